"""A request to stop, by SIGTERM or SIGINT, or by SIGHUP where a terminal is closed.

Schedulers announce a pre-emption by SIGTERM and kill some time later. A rank that is asked to stop finishes its step
with the others, which only the ranks together can decide; this is the ear of one of them.

Python runs a signal's handler when the main thread comes back from what it does, which is too late where that is a
collective that hangs. So the signals are read by a thread of their own, which C code wakes at once.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from distap.errors import RESTART
from distap.processes.exit_statuses import record_outcome

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TRACE_SIGNAL = signal.SIGUSR1
MARGIN_SECONDS = 15  # beyond the grace time, before a launcher kills a rank
ONE_REQUEST_SECONDS = 1.0  # a launcher passes on what its whole process group was sent: that is no second request
logger = logging.getLogger("distap")


class StopRequest:
    """Listens while it is entered, in the main thread.

    The first signal is a request: `requested` becomes true. A second one, a second or more after it, ends the
    process at once, and so does the end of the grace time, with the status that says `restart me`.

    Args:
        grace_seconds: time from the first signal to the end of the process, whatever it does.
        on_trace_signal: is called at each TRACE_SIGNAL, from a thread.
    """

    def __init__(self, grace_seconds: float, on_trace_signal: Callable[[], None] = lambda: None) -> None:
        self.grace_seconds = grace_seconds
        self._on_trace_signal = on_trace_signal
        self.requested = False
        self._pid = os.getpid()
        self._first = 0.0
        self._handlers: dict[int, object] = {}
        self._limit: threading.Timer | None = None

    def __enter__(self) -> "StopRequest":
        self._inbox, outbox = os.pipe()
        os.set_blocking(outbox, False)
        self._outbox = outbox
        self._wakeup_before = signal.set_wakeup_fd(outbox, warn_on_full_buffer=False)
        for number in _heeded():
            self._handlers[number] = signal.signal(number, _left_to_the_thread)
        signal.signal(TRACE_SIGNAL, _left_to_the_thread)
        # A launcher starts its ranks with it blocked, since it would end one that does not listen yet.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [TRACE_SIGNAL])
        os.register_at_fork(after_in_child=self._leave_in_child)
        threading.Thread(target=self._listen, name="distap-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave
        self._handlers.clear()
        # Nothing is left to trace, and Python's own end would give the signal its deadly default back.
        signal.signal(TRACE_SIGNAL, signal.SIG_IGN)
        if self._limit is not None:
            self._limit.cancel()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._outbox)  # ends the thread

    def _listen(self) -> None:
        while number := os.read(self._inbox, 1):
            if number[0] in SIGNALS:
                self._heard(signal.Signals(number[0]))
            elif number[0] == TRACE_SIGNAL:
                self._on_trace_signal()
        os.close(self._inbox)

    def _heard(self, number: signal.Signals) -> None:
        if not self.requested:
            self._first = time.monotonic()
            self.requested = True
            self._limit = threading.Timer(self.grace_seconds, self._out_of_time)
            self._limit.daemon = True
            self._limit.start()
            logger.warning(
                "%s: stopping after this step, with a checkpoint, within %.0f s; a second %s stops at once",
                number.name,
                self.grace_seconds,
                number.name,
            )
        elif time.monotonic() - self._first >= ONE_REQUEST_SECONDS:
            logger.warning("%s again: stopping at once; what came after the last checkpoint is lost", number.name)
            _end(128 + number)

    def _out_of_time(self) -> None:
        logger.error(
            "the grace time of %.0f s (stop.grace_seconds) is over; what came after the last checkpoint is lost",
            self.grace_seconds,
        )
        _end(RESTART)

    def _leave_in_child(self) -> None:
        """A loader worker, forked off, must not speak for this rank: the pipe is shared."""
        if self._handlers and os.getpid() != self._pid:
            signal.set_wakeup_fd(-1)
            go_deaf()


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Take the signal without dying of it."""


def end_when_asked(tidy: Callable[[], None] = lambda: None) -> None:
    """Until a StopRequest listens there is nothing to save: a signal ends the process at once, to be started again.

    It does so without an exception, which would get lost in imports, and would have torch end the meeting of all
    hosts. A signal that asks for a trace, of which there is nothing yet, does not end it.

    Args:
        tidy: is called before the end.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:
            tidy()
        finally:
            _end(RESTART)

    for number in _heeded():
        signal.signal(number, end)
    signal.signal(TRACE_SIGNAL, _left_to_the_thread)


def leave_when_asked() -> None:
    """The same for what has files to close: a signal raises SystemExit, once everything is imported."""
    for number in _heeded():
        signal.signal(number, _leave)
    signal.signal(TRACE_SIGNAL, _left_to_the_thread)


def go_deaf() -> None:
    """Once it is settled how a process leaves, a request to stop would only take the place of that status."""
    for number in (*SIGNALS, TRACE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


def _heeded() -> list[signal.Signals]:
    """Those that are not ignored, as `nohup` has it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(RESTART)


def _end(status: int) -> None:
    try:
        record_outcome(status)
    finally:
        os._exit(status)
