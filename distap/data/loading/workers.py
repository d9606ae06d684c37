"""The processes that read: they end with their rank, and when one is lost, a person is told why that may be."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from distap.data.shards.parallel import forking_context
from distap.errors import FAILED, DistapError
from distap.processes.exit_statuses import die_with_parent
from distap.processes.stopping import go_deaf


class LostWorkerError(DistapError):
    """A process that reads images has ended without being asked to; starting again may help."""

    status = FAILED

    @classmethod
    def because(cls, what: str) -> "LostWorkerError":
        """One that says what happened to which worker, and why it usually does."""
        return cls(
            f"a process that reads images was lost: {what}. Usual causes: the host's memory was used up (its kernel "
            "log names the process then): set data.workers or data.prefetch lower, or data.pixels.hold to spool; or "
            "/dev/shm is too small, 64 MB in a container unless its --shm-size, or a volume of medium Memory at "
            "/dev/shm, says more"
        )


def handed_over(images: Dataset[Any], workers: int, prefetch: int, **how: Any) -> Generator[Any, None, None]:
    """What processes that read make of images, in order; they end with this.

    Args:
        images: to read.
        workers: processes; 0 reads in this one.
        prefetch: what each makes ahead.
        how: further arguments of torch's DataLoader.
    Raises:
        DistapError: what a worker raised, or that one was lost.
    """
    if workers:
        how |= {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "worker_init_fn": partial(_begin, os.getpid()),
            "multiprocessing_context": forking_context(),
        }
    failure: DistapError | None = None
    with LoaderWorkers() as started:
        chunks = iter(DataLoader(images, **how))
    try:
        while True:
            with started.awaited():
                chunk = next(chunks, None)
            if chunk is None:
                break
            yield chunk
    except LostWorkerError as error:
        started.kill()  # the others may wait for what the lost one held
        failure = LostWorkerError(str(error))
    except DistapError as error:
        # The loader has put the worker's traceback before the message that is meant for the user.
        failure = type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip())
    finally:
        # Now, and not when an error that refers to it is forgotten: by then its workers hear no more.
        del chunks
        started.kill()
    if failure is not None:
        raise failure


def _begin(rank: int, _: int) -> None:
    """Make this worker end with its rank, whose process id is given, and with nothing else.

    Signals to the whole process group are the rank's matter: it finishes its step, for which it needs its workers.
    """
    # What the rank had is not for this process to clean up: a loader of the rank that was collected here would end
    # its workers, and looking at shared memory would copy it.
    gc.freeze()
    go_deaf()
    die_with_parent()
    if os.getppid() != rank:  # it had ended before it was asked to take its workers along
        os._exit(FAILED)


class LoaderWorkers:
    """The workers of one loader, which start while this is entered.

    Python's end kills those that are left, since it would wait for one that is stuck in a slow read.
    """

    def __init__(self) -> None:
        self._workers: list[BaseProcess] = []

    def __enter__(self) -> "LoaderWorkers":
        self._others = active_children()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers += [process for process in active_children() if process not in self._others]
        if self._workers:
            Finalize(None, _kill, args=(self._workers,), exitpriority=0)
            theirs = signal.getsignal(signal.SIGCHLD)
            if callable(theirs) and not isinstance(theirs, _WhileWaiting) and current_thread() is main_thread():
                signal.signal(signal.SIGCHLD, _WhileWaiting(theirs))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Waiting for them, which ends with an error when one is lost.

        Raises:
            LostWorkerError: one was lost, now or before.
        """
        for worker in self._workers:
            if not worker.is_alive():
                raise LostWorkerError.because(f"worker {worker.pid} has ended with status {worker.exitcode}")
        handler = signal.getsignal(signal.SIGCHLD)
        if isinstance(handler, _WhileWaiting):
            handler.waiting = True
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise LostWorkerError.because(str(error).removeprefix("DataLoader ").partition(". ")[0]) from None
        finally:
            if isinstance(handler, _WhileWaiting):
                handler.waiting = False

    def kill(self) -> None:
        """End those that are still there."""
        _kill(self._workers)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(1)  # longer only where the kernel itself is stuck
    workers.clear()


class _WhileWaiting:
    """Lets torch's handler of SIGCHLD, with which its loader notices a lost worker, speak while it is waited for.

    It raises in the midst of whatever the rank is doing, be it a collective or the handling of another error.
    """

    def __init__(self, theirs: Callable[[int, FrameType | None], Any]) -> None:
        self.theirs, self.waiting = theirs, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.waiting:
            self.theirs(number, frame)
