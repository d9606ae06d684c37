"""Write and read a run's log, metrics.jsonl: one JSON object for each step or evaluation."""

import json
import logging
import math
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from distap import __version__
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.texts import MOST_TEXT, parsed_json

RUN_LOG, NOT_FINITE_LOG, STARTS_LOG = "metrics.jsonl", "not_finite.jsonl", "starts.jsonl"
logger = logging.getLogger("distap")


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a file of JSON lines; warn if the line is lost, for example on a full disk."""
    line = memoryview((json.dumps(_finite(entry), allow_nan=False) + "\n").encode())
    try:
        with path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(whole)
                raise
    except OSError as error:
        logger.warning("%s: a line is lost: %s", path, error)


def cut_run_log(folder: Path, step: int) -> None:
    """Remove lines of steps after `step` from the log of a run that continues from there, and unreadable lines."""
    path = folder / RUN_LOG
    lines = list(_lines(path)) if path.exists() else []
    kept = [line for _, line, entry in lines if entry is not None and entry["step"] <= step]
    damaged = [str(number) for number, line, entry in lines if entry is None and line.endswith(b"\n")]
    if damaged:
        logger.warning("%s: removed %d damaged lines (%s)", path, len(damaged), ", ".join(damaged[:10]))
    if len(kept) < len(lines) or not all(line.endswith(b"\n") for line in kept):
        write_whole(path, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))


def log_not_finite(folder: Path, step: int, what: str, keys: list[str]) -> None:
    """Append a step that was not applied to folder/not_finite.jsonl, with the keys of its images.

    Entries of earlier attempts at a step stay, since they are what a person looks for.
    """
    append_line(folder / NOT_FINITE_LOG, {"step": step, "time": time.time(), "what": what, "samples": keys})


def log_start(folder: Path, step: int, **about: Any) -> None:
    """Append when, where and with which versions a training starts from `step` to folder/starts.jsonl."""
    versions = {"distap": version_with_commit(), "torch": torch.__version__, "python": platform.python_version()}
    own = {"step": step, "time": time.time(), "host": socket.gethostname()}
    append_line(folder / STARTS_LOG, {**own, **versions, **about})


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read what `log_start` wrote; return nothing for a run from before that file existed."""
    path = folder / STARTS_LOG
    return [entry for _, _, entry in _lines(path) if entry is not None] if path.is_file() else []


def read_run_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log; skip a last line that an interruption cut short."""
    path = folder / RUN_LOG
    if not path.is_file():
        raise DistapError(f"{path}: no such run log; a training writes it into its run folder")
    entries = []
    for number, line, entry in _lines(path):
        if entry is not None:
            entries.append(entry)
        elif line.endswith(b"\n"):
            raise DistapError(f"{path}, line {number}: damaged: {line[:60]!r}; remove the line")
    return entries


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield numbered lines of a log, with their entries if readable."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_TEXT), b""), 1):
            try:
                entry = parsed_json(line)
            except ValueError:  # of JSON or of UTF-8
                entry = None
            yield number, line, entry if entry is not None and isinstance(entry.get("step"), int) else None


@cache
def version_with_commit() -> str:
    """Return distap's version and, if it runs from a checkout, its commit: 0.1.0+g1a2b3c4, or ...-dirty."""
    return "+g".join(filter(None, (__version__, _commit())))


def _commit() -> str | None:
    """Return the commit of distap's checkout, with `-dirty` if files differ; None without a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(folder), *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:  # site-packages may lie within a checkout of something else, which does not track them
        return (git("ls-files", "runlog.py") and git("describe", "--always", "--dirty", "--exclude=*")) or None
    except (OSError, subprocess.SubprocessError):
        return None


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
