"""Write and read a run's log, metrics.jsonl: one JSON object for each step or evaluation."""

import json
import logging
import math
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from distap import __version__
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.texts import MOST_TEXT, parsed_json

RUN_LOG, DAMAGED_LOG, NOT_FINITE_LOG = "metrics.jsonl", "metrics.damaged.jsonl", "not_finite.jsonl"
STARTS_LOG = "starts.jsonl"
logger = logging.getLogger("distap")


class JsonLinesFile:
    """Append whole JSON lines to a file; while the disk is full, keep them in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, entry: dict[str, Any]) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += _line(entry).encode()
        error = self._write_waiting()
        if error and not was_waiting:
            logger.warning("%s: cannot be written: %s; its lines wait until it can be", self.path, error)

    def close(self) -> None:
        error = self._write_waiting()
        if error:
            lost = self._waiting.count(b"\n")
            logger.error("%s: its last lines are lost (%d): %s", self.path, lost, error)
        self._file.close()

    def _write_waiting(self) -> OSError | None:
        """Write all waiting lines or none; return the reason if they could not be written."""
        whole = self._file.seek(0, os.SEEK_END)
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(whole)
            return error
        self._waiting = b""
        return None


def run_log_from(folder: Path, step: int) -> JsonLinesFile:
    """Open folder/metrics.jsonl of a run that continues from `step`; remove lines of later steps.

    Lines that cannot be read go to metrics.damaged.jsonl, with a warning.
    """
    path, aside = folder / RUN_LOG, folder / DAMAGED_LOG
    lines = list(_lines(path)) if path.exists() else []
    kept = [line for _, line, entry in lines if entry is not None and entry["step"] <= step]
    damaged = {number: line for number, line, entry in lines if entry is None and line.endswith(b"\n")}
    if damaged:
        with aside.open("ab") as file:
            file.writelines(damaged.values())
        numbers = ", ".join(map(str, list(damaged)[:10]))
        logger.warning("%s: %d lines are damaged (%s); they are in %s now", path, len(damaged), numbers, aside.name)
    if len(kept) < len(lines) or not all(line.endswith(b"\n") for line in kept):
        write_whole(path, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
    return JsonLinesFile(path)


def log_not_finite(folder: Path, step: int, what: str, keys: list[str]) -> None:
    """Append a step that was not applied to folder/not_finite.jsonl, with the keys of its images.

    Entries of earlier attempts at a step stay, since they are what a person looks for.
    """
    with closing(JsonLinesFile(folder / NOT_FINITE_LOG)) as lines:
        lines.write({"step": step, "time": time.time(), "what": what, "samples": keys})


def log_start(folder: Path, step: int, **about: Any) -> None:
    """Append when, where and with which versions a training starts from `step` to folder/starts.jsonl."""
    versions = {"distap": version_with_commit(), "torch": torch.__version__, "python": platform.python_version()}
    with closing(JsonLinesFile(folder / STARTS_LOG)) as lines:
        own = {"step": step, "time": time.time(), "host": socket.gethostname()}
        lines.write({**own, **versions, **about})


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


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(_finite(entry), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
