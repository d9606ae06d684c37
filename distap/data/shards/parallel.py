"""Spread work over processes that end with their parent, and show its progress."""

import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from distap.errors import DistapError
from distap.processes.forks import die_with_parent, forking_context

Job = TypeVar("Job")
Result = TypeVar("Result")
STAT_THREADS, STAT_CHUNK = 32, 256  # a network file system answers slowly, but many questions at once

# Wraps a loop over (items, description, total): yields the items unchanged and shows the progress.
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


def untracked(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Yield the items without showing progress: the default of every argument `track`."""
    return items


def ask_files(question: Callable[[Job], Result], items: Collection[Job], about: str, track: Track) -> list[Result]:
    """Yield the result of `question` for each item in order, with many questions under way at once."""
    with ThreadPool(STAT_THREADS) as pool:
        answers = list(track(pool.imap(question, items, STAT_CHUNK), about, len(items)))
        pool.close()
        pool.join()  # so that no thread is left when processes are forked
    return answers


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, about: str = "", track: Track = untracked
) -> list[Result]:
    """Yield the results of jobs in order, from up to `workers` processes (from this one if one is enough).

    After an error or Ctrl-C, or if this process dies, the workers end at once, in the middle of their jobs.
    The function and what it raises must be picklable. A worker that is killed raises a DistapError.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        return list(track(map(function, jobs), about, len(jobs)))
    others = active_children()
    pool = ProcessPoolExecutor(workers, forking_context(), initializer=_begin)
    try:
        # Not by its `map`, which cancels what is left: the pool fails at that if its workers are killed meanwhile.
        futures = [pool.submit(function, job) for job in jobs]
        results = list(track((future.result() for future in futures), about, len(jobs)))
        pool.shutdown()
        return results
    except BrokenProcessPool as error:
        raise DistapError(
            "a worker process ended in the middle of its work; unless a reason is printed above, memory most likely "
            "ran out: call again with fewer --workers"
        ) from error
    finally:
        kill_all([process for process in active_children() if process not in others])
        pool.shutdown()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    die_with_parent()


def kill_all(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)  # takes longer only if the kernel itself is stuck
    workers.clear()
