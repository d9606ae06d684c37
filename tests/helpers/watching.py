"""`distap watch` as a process of its own, and what a browser or a client reads from its page."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from launching import Job, Program, started


@contextmanager
def watching(run: Path, folder: Path, *options: str) -> Iterator[tuple[str, Job]]:
    """URL of a server that watches a run folder, and its process."""
    arguments = ("-m", "distap.cli", "watch", str(run), "--port", "0", *options)
    with started(Program(arguments, folder), folder) as job:
        job.wait_until(lambda: "watching " in job.said)
        yield re.search(r" on (\S+)$", job.said.strip())[1], job


def parts_of(url: str, **known: str) -> dict[str, Any]:
    """The parts of the page that differ from those of `known` marks."""
    return dict(httpx.get(f"{url}/parts", params=known).raise_for_status().json())


def text_of(html: str) -> str:
    """What a person reads."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())
