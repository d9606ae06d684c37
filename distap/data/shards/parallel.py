"""Work spread over processes that stop with their parent, however it ends."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import TypeVar

from distap.errors import DistapError

Job = TypeVar("Job")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forking_context() -> BaseContext:
    """How processes start here, whatever Python's own way is: a copy of this one where that is safe.

    A server that forks, which is Python's way from 3.14 on, or a spawn would import torch anew, seconds for each
    command, and the server would be the parent with which its processes end.
    """
    return multiprocessing.get_context("fork" if sys.platform == "linux" else None)


@contextmanager
def spread(function: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[Iterator[Result]]:
    """Results of the jobs in their order, computed by up to `workers` processes; by this one where one is enough.

    Whatever leaves the block early (an error, Ctrl-C) ends the processes at once, in the middle of their jobs; so
    does the death of this process.

    Args:
        function: of a module, so that it can be sent by its name; what it raises must survive pickling.
        jobs, workers: as they say.
    Raises:
        DistapError: a process was killed, or could not start.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield map(function, jobs)
        return
    context = forking_context()
    ours, theirs = context.Pipe()
    pool = ProcessPoolExecutor(workers, context, initializer=_tie, initargs=(ours, theirs))
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


def _tie(of_parent: Connection, to_parent: Connection) -> None:
    """End this process when the parent's end of the connection closes, of which this process has a copy."""
    of_parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides

    def wait() -> None:
        to_parent.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
