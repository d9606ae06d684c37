"""Loader worker processes: read images, end with their rank, and explain the loss of a worker."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from multiprocessing import active_children
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from distap.data.shards.parallel import kill_all
from distap.errors import FAILED, DistapError
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.stopping import go_deaf

SHARED_MEMORY = "/dev/shm"  # through which workers hand images over
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # of a socket in it
LONGEST_WAIT = 600.0  # seconds for the next chunk
_abandoned: list[Any] = []  # loaders that lost a worker
logger = logging.getLogger("distap")


class LostWorkerError(DistapError):
    """Raised if a process that reads images has died or hangs."""

    status = FAILED


def handed_over(
    images: Dataset[Any],
    requests: Iterable[list[Any]] | None,
    workers: int,
    prefetch: int,
    *,
    longest_wait: float = LONGEST_WAIT,
    bytes_ahead: int = 0,
    where: Callable[[Any], str] = str,
) -> Generator[Any]:
    """Yield `images[request]` of each request, read by processes that end with this generator.

    Args:
        images: torch's map-style data set; or, if `requests` is None, an iterable one.
        workers: number of processes; 0 reads in this one.
        prefetch: requests that each worker reads ahead.
        longest_wait: seconds after which workers that hand nothing over count as lost.
        bytes_ahead: bytes that workers prepare before use, which shared memory must hold.
        where: names an item of a request in messages.

    Raises:
        DistapError: a worker raised it, or shared memory is too small.
        LostWorkerError: a worker was lost.
    """
    asked = deque[Any]()
    options: dict[str, Any] = {"batch_size": None, "collate_fn": _unchanged}
    if requests is not None:
        options["sampler"] = _noted(requests, asked)
    if workers and Path(SHARED_MEMORY).is_dir() and os.statvfs(SHARED_MEMORY).f_flag & os.ST_RDONLY:
        logger.warning("%s is read-only: images are read without data.workers, one after the other", SHARED_MEMORY)
        workers = 0
    if workers:
        _require_shared_memory(bytes_ahead)
        options |= {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "timeout": longest_wait,
            "worker_init_fn": partial(_begin, os.getpid()),
            "multiprocessing_context": _Context() if sys.platform == "linux" else forking_context(),
        }
    others = active_children()
    chunks = iter(DataLoader(images, **options))
    started = [process for process in active_children() if process not in others]
    if started:
        # The end of Python would wait for a worker that is stuck in a slow read.
        Finalize(None, kill_all, args=(started,), exitpriority=0)
        theirs = signal.getsignal(signal.SIGCHLD)  # would otherwise raise in the midst of, say, a collective
        if callable(theirs) and not isinstance(theirs, _WhileWaiting) and current_thread() is main_thread():
            signal.signal(signal.SIGCHLD, _WhileWaiting(theirs))
    failure: DistapError | None = None

    def next_image() -> str:
        return f", such as {where(asked[0])}" if asked else ""

    try:
        while (chunk := _awaited(chunks, started, next_image)) is not None:
            if asked:
                asked.popleft()
            yield chunk
    except DistapError as error:
        # The loader has put the worker's traceback before the message that is meant for the user.
        failure = type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip())
    finally:
        if isinstance(failure, LostWorkerError):
            kill_all(started)
            _abandoned.append(chunks)  # its end would wait for a lock that a lost worker may have held
        else:
            # Before any worker is killed, since one may hold that lock. It waits some seconds for one that is stuck.
            del chunks
            kill_all(started)
    if failure is not None:
        raise failure


def _unchanged(item: Any) -> Any:
    return item


def _begin(rank: int, _: int) -> None:
    """Make this worker end with its rank (a process id) and ignore requests to stop."""
    # Leave alone what the rank had: collecting one of its loaders here would end that loader's workers, and touching
    # shared memory would copy it.
    gc.freeze()
    go_deaf()  # to signals to the process group: the rank finishes its step, and needs its workers for that
    die_with_parent(rank)


def _noted(requests: Iterable[list[Any]], asked: deque[Any]) -> Iterator[list[Any]]:
    """Yield the requests, and note the first image of each."""
    for request in requests:
        asked.append(request[0])
        yield request


class _Queue(Queue):  # type: ignore[type-arg]  # as the class cannot be subscripted
    def _on_queue_feeder_error(self, error: Exception, handed: Any) -> None:
        """End this process, since nothing else would tell that an item is lost, and the rank would wait for it."""
        logger.error("an image cannot be handed over: %s: %s", type(error).__name__, error)
        os._exit(FAILED)


class _Context(ForkContext):
    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - multiprocessing's name
        return _Queue(maxsize, ctx=self.get_context())


def _require_shared_memory(size: int) -> None:
    """Raise a DistapError if workers cannot hand images over: through shared memory, named by sockets."""
    if not Path(SHARED_MEMORY).is_dir():
        return  # another system than Linux
    if len(folder := tempfile.gettempdir()) > LONGEST_FOLDER:
        raise DistapError(
            f"{folder}: the folder for temporary files has a path of {len(folder)} characters, and the sockets that "
            f"hand images over take {LONGEST_FOLDER}: set TMPDIR to a shorter one, or data.workers to 0"
        )
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < size:
        raise DistapError(
            f"{SHARED_MEMORY} has {free / 1e6:,.1f} MB free, but the processes that read images hand over "
            f"{size / 1e6:,.1f} MB ahead: give the container more (--shm-size, or a volume of medium Memory), or set "
            "data.prefetch or data.workers lower"
        )


def _awaited(chunks: Iterator[Any], workers: list[BaseProcess], next_image: Callable[[], str]) -> Any:
    """Return the next chunk, None at the end; raise LostWorkerError if a worker is or was lost."""
    for worker in workers:
        if worker.exitcode:  # one that raised an error ends with 0, and its error is among the chunks
            raise _lost(f"worker {worker.pid} has ended with status {worker.exitcode}")
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _WhileWaiting):
        handler.waiting = True
    try:
        return next(chunks, None)
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise LostWorkerError(
                f"the processes that read images have handed nothing over for {str(error).split()[-2]} s: the "
                f"storage hangs, or reading takes longer{next_image()}"
            ) from None
        if not str(error).startswith("DataLoader worker"):
            raise
        raise _lost(str(error).removeprefix("DataLoader ").partition(". ")[0]) from None
    except (EOFError, ConnectionError) as error:
        raise _lost(f"worker ended while it handed over an image ({error!r})") from None
    finally:
        if isinstance(handler, _WhileWaiting):
            handler.waiting = False


def _lost(cause: str) -> LostWorkerError:
    return LostWorkerError(
        f"a process that reads images was lost: {cause}. Usual causes: the host's memory was used up (see its kernel "
        "log): set data.workers or data.prefetch lower, or data.pixels.hold to spool; or /dev/shm is too small: a "
        "container has 64 MB there unless its --shm-size, or a volume of medium Memory, says more"
    )


class _WhileWaiting:
    """Let torch's SIGCHLD handler, which raises when a worker is lost, run only while the rank waits for one."""

    def __init__(self, theirs: Callable[[int, FrameType | None], Any]) -> None:
        self.theirs, self.waiting = theirs, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.waiting:
            self.theirs(number, frame)
