"""Listen for requests to stop: SIGTERM, SIGINT, and SIGHUP from a closed terminal.

Schedulers announce a pre-emption by SIGTERM and kill some time later. A rank that is asked to stop
finishes its step with the others; the ranks decide together when that is.

Python runs a signal's handler when the main thread returns to Python code, which is too late if
that thread hangs in a collective. So a thread of its own reads the signals from a pipe that
Python's C handler writes to at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from distap.errors import RESTART, logger

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TRACE_SIGNAL = signal.SIGUSR1
MARGIN_SECONDS = 15  # beyond the grace time, before a launcher kills a rank
Handler = Callable[[int, FrameType | None], object]
ONE_REQUEST_SECONDS = 1.0  # a signal to a process group arrives twice, once through the launcher


class StopRequest:
    """Listen for requests to stop while entered, in the main thread.

    The first signal sets `requested`. The process ends at once when a second one comes, a second or
    more later, and with the status RESTART `grace_seconds` after the first. TRACE_SIGNAL sets
    `trace_asked`, which its reader clears.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.requested = self.trace_asked = False
        self._first = 0.0  # time of the first signal
        self._handlers: dict[int, Any] = {}  # that were there before
        self._limit: threading.Timer | None = None

    def __enter__(self) -> "StopRequest":
        self._inbox, self._outbox = os.pipe()
        # a full pipe must not hold up the handler, wherever it interrupts
        os.set_blocking(self._outbox, False)
        self._wakeup_before = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._handlers = call_on_signal(_left_to_the_thread)
        # A launcher starts ranks with this signal blocked, since it would kill one that does not
        # listen yet.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [TRACE_SIGNAL])
        self._thread = threading.Thread(target=self._listen, name="distap-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        # When Python exits it restores the default action, which would kill the process.
        signal.signal(TRACE_SIGNAL, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._outbox)
        self._thread.join()  # it has read what came before, which may have set the limit
        if self._limit is not None:
            self._limit.cancel()
            self._limit.join()

    def _listen(self) -> None:
        while number := os.read(self._inbox, 1):
            if number[0] in SIGNALS:
                self._count_request(signal.Signals(number[0]))
            elif number[0] == TRACE_SIGNAL:
                self.trace_asked = True
        os.close(self._inbox)

    def _count_request(self, number: signal.Signals) -> None:
        # The grace time needs a timer: the main thread may wait in a collective for a rank that is
        # gone, and notice nothing.
        if not self.requested:
            self._first = time.monotonic()
            self.requested = True
            self._limit = threading.Timer(self.grace_seconds, self._out_of_time)
            self._limit.daemon = True
            self._limit.start()
            logger.warning(
                "%s: stopping after this step, with a checkpoint, within %.0f s; a second %s stops"
                " at once",
                number.name,
                self.grace_seconds,
                number.name,
            )
        elif time.monotonic() - self._first >= ONE_REQUEST_SECONDS:
            logger.warning(
                "%s again: stopping at once; what came after the last checkpoint is lost",
                number.name,
            )
            # The main thread may hang, so this thread ends the process, with the status that shells
            # give a signal.
            os._exit(128 + number)

    def _out_of_time(self) -> None:
        logger.error(
            "the grace time of %.0f s (stop.grace_seconds) is over; what came after the last"
            " checkpoint is lost",
            self.grace_seconds,
        )
        os._exit(RESTART)


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: a thread reads the signal from the pipe and handles it."""


def end_when_asked() -> None:
    """Exit with RESTART on a signal, until a StopRequest listens: nothing needs saving so far."""
    call_on_signal(lambda *_: os._exit(RESTART))  # imports would swallow an exception


def leave_when_asked() -> None:
    """Raise SystemExit(RESTART) on a signal, so that files are closed. Call it after imports."""
    call_on_signal(lambda *_: sys.exit(RESTART))


def go_deaf() -> None:
    """Ignore all signals from now on, so that the exit status cannot change any more."""
    for number in (*SIGNALS, TRACE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


def call_on_signal(handler: Handler, on_trace: Handler = _left_to_the_thread) -> dict[int, Any]:
    """Call `handler` at each request to stop and `on_trace` at each TRACE_SIGNAL.

    Return the previous handlers of the requests.
    """
    signal.signal(TRACE_SIGNAL, on_trace)
    # `nohup` ignores SIGHUP, and so do we then.
    heeded = [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in heeded}
