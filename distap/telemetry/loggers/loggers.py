"""The loggers of a run, each in a thread of its own behind a bounded queue.

A logger that is slow or broken loses lines, which are counted, and never holds the training up. The figures are those
of metrics.jsonl under the same names; nested names are joined by a slash (`seconds/describe`, `validation/mAP`), and
figures that are not finite are left out.
"""

import importlib.util
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from distap.errors import DistapError
from distap.storage.redact import without_secrets
from distap.telemetry.loggers.protocol import LoggedRun, Logger, LoggerSettings, Outcome

FAILED_SECONDS = 3.0  # to close after a failure, which the other ranks notice only when this one leaves
OPEN_AGAIN_SECONDS = 60.0
logger = logging.getLogger("distap")
left_hanging = threading.Event()  # a logger's thread did not end


def refuse_unusable(chosen: Mapping[str, LoggerSettings], is_first: bool) -> None:
    """Refuse loggers that cannot work, before training starts.

    Args:
        chosen: settings by name; a name of ours is also that of its package and of distap's extra.
        is_first: whether this is rank 0, which imports the packages as well.
    Raises:
        DistapError: a package is missing, or a person must mend something else.
    """
    for name, settings in chosen.items():
        missing = f"loggers.{name}: the package {name} is missing; pip install 'distap[{name}]', or leave it out"
        if name in ("tensorboard", "wandb", "mlflow") and importlib.util.find_spec(name) is None:
            raise DistapError(missing)
        if is_first:
            try:
                settings.prepare()
            except ImportError as error:
                raise DistapError(f"{missing} ({error})") from error


class Loggers:
    """Open while it is entered; used on rank 0.

    Args:
        chosen: settings by name, found usable.
        run: the run to log.
        lines: how many lines may wait for each logger.
        close_seconds: time that all have together to close.
        count_lost: called with the logger's name for each line that is lost.
    """

    def __init__(
        self,
        chosen: Mapping[str, LoggerSettings],
        run: LoggedRun,
        lines: int,
        close_seconds: float,
        count_lost: Callable[[str], None],
    ) -> None:
        self._chosen, self._run, self._lines = chosen, run, lines
        self._close_seconds, self._count_lost = close_seconds, count_lost
        self._outlets: list[Outlet] = []
        self._step = run.step

    def __enter__(self) -> "Loggers":
        self._outlets = [
            Outlet(name, settings, self._run, self._lines, partial(self._count_lost, name))
            for name, settings in self._chosen.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done: Outcome = "finished" if self._step >= self._run.steps else "stopped"
        outcome: Outcome = done if kind is None else "failed"
        seconds = self._close_seconds if kind is None else min(self._close_seconds, FAILED_SECONDS)
        deadline = time.monotonic() + seconds
        for outlet in self._outlets:
            outlet.begin_to_close(outcome)
        for outlet in self._outlets:
            outlet.finish(max(0.0, deadline - time.monotonic()))

    def log(self, entry: Mapping[str, Any]) -> None:
        """Hand a line of the run's log to each logger; it has `step` and `time`."""
        self._step = entry["step"]
        figures = finite_figures({key: value for key, value in entry.items() if key not in ("step", "time")})
        for outlet in self._outlets:
            outlet.log(entry["step"], entry["time"], figures)


def finite_figures(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a line, nested ones by their path."""
    figures: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            figures |= finite_figures(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            figures[prefix + key] = float(value)
    return figures


class Outlet:
    """One logger, and the thread that calls it; `log` never waits.

    Args:
        name, settings, run: of the logger.
        lines: how many lines may wait; further ones are lost.
        count_lost: called for each lost line.
    """

    def __init__(
        self, name: str, settings: LoggerSettings, run: LoggedRun, lines: int, count_lost: Callable[[], None]
    ) -> None:
        self.name, self.lost = name, 0
        self._settings, self._run, self._lines, self._count_lost = settings, run, lines, count_lost
        self._queue: SimpleQueue[tuple[int, float, Mapping[str, float]] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._outcome: Outcome = "failed"
        self._handed = self._done = 0  # lines put into the queue, and lines taken from it
        self._lock = threading.Lock()  # guards `lost`, which both threads count
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name=f"distap-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Put a line into the queue, or lose it if too many wait."""
        if self._queue.qsize() >= self._lines:
            self._lose(f"{self._lines} lines wait for it (loggers.lines)")
        else:
            self._handed += 1
            self._queue.put((step, time, figures))

    def begin_to_close(self, outcome: Outcome) -> None:
        """Tell the thread that no further line comes."""
        self._outcome = outcome
        self._closing.set()
        self._queue.put(None)

    def finish(self, seconds: float) -> None:
        """Wait at most this long until the logger has closed; lines that it has not taken by then are lost."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            left_hanging.set()
            self._lose("it does not come to an end (loggers.close_seconds)", self._handed - self._done)
        if self.lost:
            logger.warning("loggers.%s: %d lines were lost; they are in the run folder's log", self.name, self.lost)

    def _work(self) -> None:
        # BaseException, since packages raise SystemExit as well, which would end this thread without a word.
        opened = self._opened()
        while (line := self._queue.get()) is not None:
            if opened is None:
                self._lose("it could not be opened")
            else:
                try:
                    opened.log(*line)
                except BaseException as error:
                    self._lose(_told(error))
            self._done += 1
        if opened is not None:
            try:
                opened.close(self._outcome)
            except BaseException as error:
                self._warn(f"it cannot be closed: {_told(error)}")

    def _opened(self) -> Logger | None:
        """Open the logger, trying again and again; None if the run ends before that works."""
        while True:
            try:
                return self._settings.open(self._run)
            except BaseException as error:
                self._warn(f"it cannot be opened: {_told(error)}")
            if self._closing.wait(OPEN_AGAIN_SECONDS):
                return None

    def _lose(self, reason: str, lines: int = 1) -> None:
        with self._lock:
            self.lost += lines
            for _ in range(lines):
                self._count_lost()
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn once, since later losses usually have the same reason."""
        if not self._has_warned:
            logger.warning("loggers.%s: figures are lost: %s; training goes on", self.name, reason)
        self._has_warned = True


def end_if_hanging(status: int) -> None:
    """End the process at once if a logger hangs: exit handlers of its package would wait for it."""
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
