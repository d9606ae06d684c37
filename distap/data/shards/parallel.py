"""Spread work over processes that end with their parent, and show its progress."""

import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

from distap.errors import FAILED, DistapError, logger
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.stopping import go_deaf

Job = TypeVar("Job")
Result = TypeVar("Result")
STAT_THREADS, STAT_CHUNK = 32, 256  # a network file system answers slowly, but many questions at once
SHARED_MEMORY = "/dev/shm"  # through which workers hand images over
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # of a socket in it
LONGEST_WAIT = 600.0  # seconds for the next images

# Wraps a loop over (items, description, total): yields the items unchanged and shows the progress.
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


class LostWorkerError(DistapError):
    """Raised if a worker process has died or hangs."""

    status = FAILED


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
    """Return the results of jobs in order, from up to `workers` processes (from this one if one is enough).

    After an error or Ctrl-C, or if this process dies, the workers end at once, in the middle of their jobs.
    The function and what it raises must be picklable. A worker that is killed raises a DistapError.
    """
    if (workers := min(workers, len(jobs))) <= 1:
        return list(track(map(function, jobs), about, len(jobs)))
    with closing(in_processes(function, jobs, workers)) as results:
        try:
            return list(track(results, about, len(jobs)))
        except LostWorkerError as error:
            raise DistapError(
                f"{error} in the middle of its work; unless a reason is printed above, memory most likely ran out: "
                "call again with fewer --workers"
            ) from error


def handed_over(
    read: Callable[[Job], Result],
    requests: Iterable[Job],
    workers: int,
    prefetch: int,
    longest_wait: float = LONGEST_WAIT,
    bytes_ahead: int = 0,
    name: Callable[[Job], str] = str,
) -> Generator[Result]:
    """Yield the images that `read` returns for each request, from worker processes or, with 0, from this one.

    See `in_processes`. `bytes_ahead` are the bytes that workers prepare before use, which shared memory must hold.

    Raises:
        DistapError: a worker raised it, or shared memory is too small.
        LostWorkerError: a worker was lost.
    """
    if workers and Path(SHARED_MEMORY).is_dir() and os.statvfs(SHARED_MEMORY).f_flag & os.ST_RDONLY:
        logger.warning("%s is read-only: images are read without data.workers, one after the other", SHARED_MEMORY)
        workers = 0
    if not workers:
        yield from map(read, requests)
        return
    _require_shared_memory(bytes_ahead)
    try:
        yield from in_processes(read, requests, workers, prefetch, longest_wait, name)
    except LostWorkerError as error:
        raise LostWorkerError(
            f"a process that reads images was lost: {error}. Usual causes: the storage hangs; the host's memory was "
            "used up (see its kernel log): set data.workers or data.prefetch lower, or data.pixels.hold to spool; or "
            "/dev/shm is too small: a container has 64 MB there unless its --shm-size, or a volume of medium Memory, "
            "says more"
        ) from error


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


def in_processes(
    function: Callable[[Job], Result],
    requests: Iterable[Job],
    workers: int,
    prefetch: int = 2,
    longest_wait: float | None = None,
    name: Callable[[Job], str] = str,
) -> Generator[Result]:
    """Yield `function(request)` of each request in order, worked out by processes that end with this generator.

    Worker w of n gets the requests w, w + n, w + 2 n, ... in order, `prefetch` of them ahead.

    Raises:
        LostWorkerError: a worker has died, or needs more than `longest_wait` seconds for what `name` names.
    """
    context, remaining = forking_context(), iter(requests)
    asked = deque[tuple[Job, Connection, BaseProcess]]()
    processes = list[BaseProcess]()
    # The end of Python would wait for a worker that is stuck in a slow read.
    Finalize(None, kill_all, args=(processes,), exitpriority=0)

    def ask(pipe: Connection, process: BaseProcess) -> None:
        for request in islice(remaining, 1):
            with suppress(OSError):  # it has died, and its answers will be missed
                pipe.send(request)
            asked.append((request, pipe, process))

    try:
        pipes = list[Connection]()
        for _ in range(workers):
            pipe, theirs = context.Pipe()
            pipes.append(pipe)
            processes.append(context.Process(target=_work, args=(os.getpid(), function, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
        for _ in range(prefetch):
            for pipe, process in zip(pipes, processes, strict=True):
                ask(pipe, process)
        while asked:
            request, pipe, process = asked.popleft()
            if not wait([pipe, process.sentinel], longest_wait):
                late = f"worker {process.pid} handed nothing over for {longest_wait:g} s"
                raise LostWorkerError(f"{late}, such as {name(request)}")
            try:
                result, error = pipe.recv()
            except (EOFError, OSError) as lost:
                process.join(1)
                raise LostWorkerError(f"worker {process.pid} ended with status {process.exitcode}") from lost
            if error is not None:
                raise error
            ask(pipe, process)
            yield result
    finally:
        kill_all(processes)


def _work(parent: int, function: Callable[[Any], Any], pipe: Connection) -> None:
    """Answer requests until this process is killed."""
    # Leave alone what the parent had: touching shared memory would copy it.
    gc.freeze()
    go_deaf()  # Ctrl-C and signals to the process group reach every process; the parent decides
    die_with_parent(parent)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    while True:
        request = pipe.recv()
        answer: tuple[Any, Exception | None]
        try:
            answer = function(request), None
        except Exception as error:
            if not isinstance(error, DistapError):
                error.add_note(traceback.format_exc())
            answer = None, error
        pipe.send(answer)


def kill_all(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)  # takes longer only if the kernel itself is stuck
    workers.clear()
