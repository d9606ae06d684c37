"""Loggers of a run, each in its own thread.

A logger that is slow or broken loses lines, which are counted, and never holds the training up: W&B and MLflow have
queues too, but wait for the network when they are opened and closed, and when Python ends. The figures are those
of metrics.jsonl under the same names; nested names are joined by a slash (`seconds/describe`, `validation/mAP`), and
figures that are not finite are left out.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Literal, Protocol

from distap.errors import DistapError
from distap.registry import REGISTRY, by_path
from distap.storage.atomic import write_whole
from distap.storage.redact import without_secrets

Outcome = Literal["finished", "stopped", "failed"]
CLOSE_SECONDS = 30.0  # for loggers to finish after the last step
FAILED_SECONDS = 3.0  # to close after a failure, which the other ranks notice only when this one leaves
LINES = 1000  # that may wait for a slow logger
logger = logging.getLogger("distap")
left_hanging = threading.Event()  # a logger's thread did not end


@dataclass(frozen=True)
class LoggedRun:
    """A run, as a logger needs to know it."""

    folder: Path
    id: str
    recipe: Mapping[str, Any]  # plain nested values; a logger gets them without secrets
    step: int  # steps behind the state that the run goes on from; figures of later steps are to be replaced
    steps: int  # of the whole run

    def kept_id(self, name: str, create: Callable[[], str]) -> str:
        """Return this run's id in a logger's terms, kept in RUN/loggers/NAME; create it on first use."""
        path = self.folder / "loggers" / name
        if not path.exists():
            write_whole(path, create())
        return path.read_text()


class Logger(Protocol):
    """Interface of a logger of figures. After an error only one line is lost; calls may block."""

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Log finite figures by name, at a Unix time in seconds; a step may have several lines."""

    def close(self, outcome: Outcome) -> None:
        """Flush everything; no further call follows."""


class LoggerSettings(Protocol):
    """Interface of a logger's keys in the recipe."""

    def prepare(self) -> None:
        """Import packages and check settings before training, offline; raise ImportError if a package is missing."""

    def open(self, run: LoggedRun) -> Logger:
        """Open the logger of a run, or continue it; called in the thread that will use the logger."""
        ...


def prepare_loggers(chosen: Mapping[str, LoggerSettings]) -> None:
    """Import the packages of loggers, by name; raise a DistapError if one is missing or cannot work."""
    for name, settings in chosen.items():
        try:
            settings.prepare()
        except ImportError as error:
            package = f"'distap[{name}]'" if name in REGISTRY["logger"] else "it"
            problem = f"the package {error.name} is missing" if error.name else "its package cannot be imported"
            remedy = f"pip install {package}, or leave the logger out ({error})"
            raise DistapError(f"loggers.{name}: {problem}; {remedy}") from error


@contextmanager
def opened_loggers(
    chosen: Mapping[str, LoggerSettings],
    run: LoggedRun,
    count_lost: Callable[[str], None],
    lines: int = LINES,
    close_seconds: float = CLOSE_SECONDS,
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a run's loggers; yield a function that passes lines of the run's log, with `step` and `time`, to each.

    At most `lines` lines wait for a logger; `count_lost` gets its name for each line that is lost. In the end, all
    loggers together have `close_seconds` to close.
    """
    run = replace(run, recipe=json.loads(without_secrets(json.dumps(run.recipe))))
    outlets = [Outlet(name, settings, run, lines, partial(count_lost, name)) for name, settings in chosen.items()]
    last = run.step

    def log(entry: Mapping[str, Any]) -> None:
        nonlocal last
        last = entry["step"]
        figures = finite_figures({key: value for key, value in entry.items() if key not in ("step", "time")})
        for outlet in outlets:
            outlet.log(last, entry["time"], figures)

    outcome: Outcome = "failed"
    seconds = min(close_seconds, FAILED_SECONDS)
    try:
        yield log
        outcome, seconds = "finished" if last >= run.steps else "stopped", close_seconds
    finally:
        deadline = time.monotonic() + seconds
        for outlet in outlets:
            outlet.begin_to_close(outcome)
        for outlet in outlets:
            outlet.finish(max(0.0, deadline - time.monotonic()))


def finite_figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line; nested ones are named by path."""
    return {
        name: float(value)
        for name, value in by_path(entry, "/")
        if isinstance(value, int | float) and math.isfinite(value)
    }


class Outlet:
    """One logger and its thread; `log` never waits, and drops lines when the queue is full."""

    def __init__(
        self, name: str, settings: LoggerSettings, run: LoggedRun, lines: int, count_lost: Callable[[], None]
    ) -> None:
        self.name, self._lost = name, 0
        self._settings, self._run, self._lines, self._count_lost = settings, run, lines, count_lost
        self._queue: Queue[tuple[int, float, Mapping[str, float]] | Outcome] = Queue()  # the outcome comes last
        self._lock = threading.Lock()  # guards `_lost`, which both threads count
        self._thread = threading.Thread(target=self._work, name=f"distap-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Queue a line, or drop it if too many wait."""
        if self._queue.qsize() >= self._lines:
            self._lose(f"{self._lines} lines wait for it")
        else:
            self._queue.put((step, time, figures))

    def begin_to_close(self, outcome: Outcome) -> None:
        """Tell the thread that no further line follows."""
        self._queue.put(outcome)

    def finish(self, seconds: float) -> None:
        """Wait at most this long for the logger to close; lines left in the queue are lost."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            left_hanging.set()
            self._lose("it does not come to an end", self._queue.unfinished_tasks - 1)
        if self._lost:
            logger.warning("loggers.%s: %d lines were lost; they are in the run folder's log", self.name, self._lost)

    def _work(self) -> None:
        # BaseException, since packages raise SystemExit as well, which would end this thread without a word.
        opened, problem = None, ""
        try:
            opened = self._settings.open(self._run)
        except BaseException as error:
            problem = f"it cannot be opened: {_told(error)}"
        while not isinstance(line := self._queue.get(), str):
            try:
                if opened is not None:
                    opened.log(*line)
            except BaseException as error:
                problem = _told(error)
            if problem:
                self._lose(problem)
                problem = problem if opened is None else ""
            self._queue.task_done()
        try:
            if opened is not None:
                opened.close(line)
        except BaseException as error:
            self._lose(f"it cannot be closed: {_told(error)}", 0)

    def _lose(self, reason: str, lines: int = 1) -> None:
        """Count lost lines, and warn once, since later losses usually have the same reason."""
        with self._lock:
            if not self._lost:
                logger.warning("loggers.%s: figures are lost: %s; training goes on", self.name, reason)
            self._lost += lines
            for _ in range(lines):
                self._count_lost()


def end_if_hanging(status: int) -> None:
    """End the process at once if a logger hangs, because its package's exit handlers would wait for it."""
    if not left_hanging.is_set():
        return
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _told(error: BaseException) -> str:
    first, _, _ = str(error).strip().partition("\n")
    return without_secrets(f"{type(error).__name__}: {first[:300]}")
