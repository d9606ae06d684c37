"""Write and read a run's log: metrics.jsonl, one JSON object for each step or evaluation."""

import json
import logging
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from distap.errors import DistapError
from distap.storage.atomic import write_whole

RUN_LOG, NOT_FINITE_LOG = "metrics.jsonl", "not_finite.jsonl"
logger = logging.getLogger("distap")


class _Lines:
    """Appends JSON lines to a file. A full disk costs lines, not the training, and leaves no half line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._is_short = False

    def write(self, entry: dict[str, Any]) -> None:
        line = memoryview(_line(entry).encode())
        whole = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(whole)
            if not self._is_short:
                logger.warning("%s: cannot be written: %s; what follows is missing in it", self.path, error)
            self._is_short = True

    def close(self) -> None:
        self._file.close()


class RunLog:
    """Appends to folder/metrics.jsonl.

    Args:
        folder: the run's.
        step: the step that the run goes on from; lines of later steps are removed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / RUN_LOG
        kept = [line for line in read_run_log(folder) if line["step"] <= step] if path.exists() else []
        write_whole(path, "".join(_line(entry) for entry in kept))
        self._lines = _Lines(path)

    def write(self, entry: dict[str, Any]) -> None:
        self._lines.write(entry)

    def close(self) -> None:
        self._lines.close()


class NotFiniteLog:
    """Appends to folder/not_finite.jsonl the steps that were not applied, and their images.

    Entries of earlier attempts at a step stay, since they are what a person looks for.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOT_FINITE_LOG

    def write(self, step: int, what: str, keys: list[str]) -> None:
        """Add a step: `what` was not finite; `keys` are shard and key of each image in slot order."""
        with closing(_Lines(self.path)) as lines:
            lines.write({"step": step, "time": time.time(), "what": what, "samples": keys})


def read_run_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log; a last line that an interruption cut short is left out.

    Raises:
        DistapError: there is no log, or another line is damaged.
    """
    path = folder / RUN_LOG
    if not path.is_file():
        raise DistapError(f"{path}: no such run log; a training writes it into its run folder")
    entries = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DistapError(f"{path}, line {number}: damaged: {error}") from error
    return entries


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(_finite(entry), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
