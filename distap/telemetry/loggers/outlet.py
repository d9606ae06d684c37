"""One logger in a thread of its own, behind a queue: whatever it does, the training goes on."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from distap.storage.redact import without_secrets
from distap.telemetry.loggers.protocol import LoggedRun, Logger, LoggerSettings, Outcome

OPEN_AGAIN_SECONDS = 60.0
logger = logging.getLogger("distap")
_left_hanging = threading.Event()


@dataclass(frozen=True)
class _Line:
    step: int
    time: float
    figures: Mapping[str, float]


class Outlet:
    """A logger that takes lines without a wait.

    Args:
        name: of the logger.
        settings: what opens it.
        run: of what.
        lines: that may wait for it; those that come when so many wait are lost.
        count_lost: is called for each lost line.
    """

    def __init__(
        self, name: str, settings: LoggerSettings, run: LoggedRun, lines: int, count_lost: Callable[[], None]
    ) -> None:
        self.name, self.lost = name, 0
        self._settings, self._run, self._lines, self._count_lost = settings, run, lines, count_lost
        self._queue: SimpleQueue[_Line | None] = SimpleQueue()
        self._closing = threading.Event()
        self._outcome: Outcome = "failed"
        self._handed = self._done = 0  # lines, by the training and by the thread
        self._lock = threading.Lock()  # of what is lost, by either thread
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name=f"distap-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Hand a line over; it is lost where too many wait."""
        if self._queue.qsize() >= self._lines:
            self._lose(f"{self._lines} lines wait for it (loggers.lines)")
        else:
            self._handed += 1
            self._queue.put(_Line(step, time, figures))

    def begin_to_close(self, outcome: Outcome) -> None:
        """No line comes any more."""
        self._outcome = outcome
        self._closing.set()
        self._queue.put(None)

    def finish(self, seconds: float) -> None:
        """Wait until it has closed, but no longer than so; what it has not taken by then is lost."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            _left_hanging.set()
            self._lose("it does not come to an end (loggers.close_seconds)", self._handed - self._done)
        if self.lost:
            logger.warning("loggers.%s: %d lines were lost; they are in the run folder's log", self.name, self.lost)

    def _work(self) -> None:
        # Packages raise SystemExit as well, which would end this thread without a word, and the lines that wait.
        opened = self._opened()
        while (line := self._queue.get()) is not None:
            if opened is None:
                self._lose("it could not be opened")
            else:
                try:
                    opened.log(line.step, line.time, line.figures)
                except BaseException as error:
                    self._lose(_told(error))
            self._done += 1
        if opened is not None:
            try:
                opened.close(self._outcome)
            except BaseException as error:
                self._warn(f"it cannot be closed: {_told(error)}")

    def _opened(self) -> Logger | None:
        """The logger, tried again and again; none where the run ends before it can be opened."""
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
        """Once: what comes after it has usually the same reason."""
        if not self._has_warned:
            logger.warning("loggers.%s: figures are lost: %s; training goes on", self.name, reason)
        self._has_warned = True


def end_if_hanging(status: int) -> None:
    """End the process at once where a logger hangs: what packages do at Python's end would wait for it."""
    if not _left_hanging.is_set():
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
