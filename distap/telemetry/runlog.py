"""Write and read a run's log, metrics.jsonl: one JSON object for each step or evaluation."""

import json
import math
import platform
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import distap
from distap.errors import DistapError, logger
from distap.storage.atomic import write_whole
from distap.storage.texts import MOST_TEXT, parsed_json

RUN_LOG, NOT_FINITE_LOG, STARTS_LOG = "metrics.jsonl", "not_finite.jsonl", "starts.jsonl"


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a file of JSON lines; warn if the line is lost, for example on a full disk."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(entry), allow_nan=False) + "\n")
    except OSError as error:
        logger.warning("%s: a line is lost: %s", path, error)


def cut_run_log(folder: Path, step: int) -> None:
    """Remove lines of steps after `step` from the log of a run that continues from there, and unreadable lines."""
    path = folder / RUN_LOG
    if path.exists():
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in _entries(path) if entry["step"] <= step))


def log_start(folder: Path, step: int, **about: Any) -> None:
    """Append when, where and with which versions a training starts from `step` to folder/starts.jsonl."""
    import torch  # here, since a page about a run needs none

    versions = {"distap": distap.__version__, "torch": torch.__version__, "python": platform.python_version()}
    own = {"step": step, "time": time.time(), "host": socket.gethostname()}
    append_line(folder / STARTS_LOG, {**own, **versions, **about})


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read the starts of a run that `log_start` logged; return nothing for a run older than this log."""
    path = folder / STARTS_LOG
    return list(_entries(path)) if path.is_file() else []


def read_run_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log."""
    path = folder / RUN_LOG
    if not path.is_file():
        raise DistapError(f"{path}: no such run log; a training writes it into its run folder")
    return list(_entries(path))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log; warn of damaged lines, but not of a last one that an interruption cut short."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_TEXT), b""), 1):
            try:
                entry = parsed_json(line)
            except ValueError:  # of JSON or of UTF-8
                entry = {}
            if isinstance(entry.get("step"), int):
                yield entry
            elif line.endswith(b"\n"):
                logger.warning("%s, line %d: damaged, and left out: %r", path, number, line[:60])


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
