"""Work spread over processes that stop with their parent, however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from distap.errors import DistapError

Job = TypeVar("Job")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def spread(function: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Iterator[Result]]:
    """Results of the jobs in their order, computed by `workers` processes; by this one where that is 1.

    Whatever leaves the block early (an error, Ctrl-C) ends the processes at once, in the middle of their jobs; so
    does the death of this process.

    Args:
        function: of a module, so that it can be sent by its name; what it raises must survive pickling.
        jobs, workers: as they say.
    Raises:
        DistapError: a process was killed, or could not start.
    """
    if workers == 1:
        yield map(function, jobs)
        return
    # Forked from a server of one thread: this process may have threads, which a plain fork copies half of.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    ours, theirs = context.Pipe()
    pool = ProcessPoolExecutor(workers, context, initializer=_tie, initargs=(theirs,))
    try:
        yield pool.map(function, jobs)
    except BaseException as error:
        ours.close()
        if isinstance(error, BrokenProcessPool):
            raise DistapError(
                "a worker process ended in the middle of its work: where it says nothing above, it was most likely "
                "killed since memory ran out; call again with fewer --workers"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def _tie(to_parent: Connection) -> None:
    """End this process when the other end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides

    def wait() -> None:
        to_parent.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
