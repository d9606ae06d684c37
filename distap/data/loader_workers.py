"""The processes that read: they end with their rank, and when one is lost, a person is told why that may be."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from distap.errors import DistapError
from distap.exits import FAILED

PR_SET_PDEATHSIG = 1  # of Linux's prctl


class LostWorkerError(DistapError):
    """A process that reads images has ended without being asked to; starting again may help."""

    status = FAILED

    @classmethod
    def of(cls, error: RuntimeError) -> "LostWorkerError | None":
        """What to say of an error of torch's loader; None where it is about something else."""
        if not str(error).startswith("DataLoader worker"):
            return None
        what = str(error).removeprefix("DataLoader worker").partition(". ")[0].strip()
        return cls(
            f"a process that reads images was lost: worker {what}. Usual causes: the host's memory was used up (its "
            "kernel log names the process then): set data.workers or data.prefetch lower, or data.pixels.hold to "
            "spool; or /dev/shm is too small, 64 MB in a container unless its --shm-size, or a volume of medium "
            "Memory at /dev/shm, says more"
        )


def begin_worker(rank: int, _: int) -> None:
    """Make this worker end with its rank, whose process id is given, and with nothing else.

    Signals to the whole process group are the rank's matter: it finishes its step, for which it needs its workers.
    """
    # What the rank had is not for this process to clean up: a loader of the rank that was collected here would end
    # its workers, and looking at shared memory would copy it.
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it had ended before it was asked to take its workers along
        os._exit(FAILED)


@contextmanager
def started_workers() -> Iterator[Callable[[], None]]:
    """Look after the workers that a loader starts within; gives a function that kills those still there.

    Python's end does the same, since it would wait for a worker that is stuck in a slow read.
    """
    workers: list[BaseProcess] = []
    before = active_children()
    yield partial(_kill, workers)
    workers += [process for process in active_children() if process not in before]
    if workers:
        Finalize(None, _kill_quietly, args=(workers,), exitpriority=0)
        _tell_of_lost_workers()


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    workers.clear()


def _kill_quietly(workers: list[BaseProcess]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would take it for a failure
    _kill(workers)


def _tell_of_lost_workers() -> None:
    """Have the handler of SIGCHLD, with which torch's loader notices a lost worker, say what a person understands."""
    theirs = signal.getsignal(signal.SIGCHLD)
    if (
        threading.current_thread() is threading.main_thread()
        and callable(theirs)
        and not isinstance(theirs, _LostWorkerHandler)
    ):
        signal.signal(signal.SIGCHLD, _LostWorkerHandler(theirs))


@dataclass(frozen=True)
class _LostWorkerHandler:
    theirs: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.theirs(number, frame)
        except RuntimeError as error:
            raise (LostWorkerError.of(error) or error) from None
