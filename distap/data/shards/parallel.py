"""Spread work over processes that end with their parent, and show its progress."""

import gc
import mmap
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import count, cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

from distap.errors import FAILED, DistapError, memory_ran_out
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.stopping import go_deaf

Job = TypeVar("Job")
Result = TypeVar("Result")
ALIGNED = 64  # bytes to which an array in shared memory is aligned
# bytes of shared memory for an answer's arrays; more go through a pipe. Unused, it takes no memory
ROOM = 2**28
LONGEST_WAIT = 600.0  # seconds for the next images

# Wraps a loop over (items, description, total): yields the items unchanged and shows the progress.
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


class LostWorkerError(DistapError):
    """Raised if a worker process has died or hangs."""

    status = FAILED

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"a process was lost: {problem}. Usual causes, unless a reason is printed above: the"
            " storage hangs; or the host's memory was used up (see its kernel log): lower"
            " data.workers (or --workers), data.prefetch or data.pixels.memory_bytes"
        )


def untracked(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Yield the items without showing progress: the default of every argument `track`."""
    return items


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int,
    about: str = "",
    track: Track = untracked,
) -> list[Result]:
    """Return the results of jobs in order, from up to `workers` processes (from this one if one is
    enough).

    After an error or Ctrl-C, or if this process dies, the workers end at once, in the middle of
    their jobs. The function and what it raises must be picklable. A worker that is killed raises a
    DistapError.
    """
    workers = min(workers, len(jobs))
    with closing(in_processes(function, jobs, workers if workers > 1 else 0)) as results:
        return list(track(results, about, len(jobs)))


class Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection
    # shared memory for the arrays of its answers, one after the other
    rooms: Iterator[mmap.mmap | None]


def in_processes(
    function: Callable[[Job], Result],
    requests: Iterable[Job],
    workers: int,
    prefetch: int = 2,
    longest_wait: float | None = None,
    name: Callable[[Job], str] = str,
    lends: bool = False,
) -> Generator[Result]:
    """Yield `function(request)` of each request in order, worked out by processes that end with
    this generator.

    Worker w of n gets the requests w, w + n, w + 2 n, ... in order, `prefetch` of them ahead; with
    0 workers, this process does the work. If a worker `lends`, NumPy's arrays in a result are in
    memory that both processes share, and are valid until the next result is asked for.

    Raises:
        LostWorkerError: a worker has died, or needs more than `longest_wait` seconds for what
            `name` names.
    """
    if not workers:
        yield from map(function, requests)
        return
    context = forking_context()
    remaining = iter(requests)
    asked = deque[tuple[Job, Worker]]()
    processes = list[BaseProcess]()
    # The end of Python would wait for a worker that is stuck in a slow read.
    Finalize(None, kill_all, args=(processes,), exitpriority=0)

    def started() -> Worker:
        pipe, theirs = context.Pipe()
        # One more than answers that wait: a worker may fill it while the caller uses the answer
        # that came last.
        rooms = list[mmap.mmap]()
        # a host that promises no more memory than it has: arrays go through the pipe
        with suppress(OSError):
            rooms = [
                mmap.mmap(-1, ROOM)
                for _ in range(prefetch + 1 if lends and sys.platform == "linux" else 0)
            ]
        process = context.Process(
            target=_work, args=(os.getpid(), function, theirs, rooms), daemon=True
        )
        processes.append(process)
        process.start()
        # With the worker alone holding its end, its death is the end of the pipe, and recv raises
        # EOFError.
        theirs.close()
        return Worker(process, pipe, cycle(rooms or [None]))

    def ask(worker: Worker) -> None:
        for request in islice(remaining, 1):
            with suppress(OSError):  # it has died, and its answers will be missed
                worker.pipe.send(request)
            asked.append((request, worker))

    try:
        team = [started() for _ in range(workers)]
        for _ in range(prefetch):
            for worker in team:
                ask(worker)
        while asked:
            request, worker = asked.popleft()
            if not wait([worker.pipe, worker.process.sentinel], longest_wait):
                late = f"worker {worker.process.pid} handed nothing over for {longest_wait:g} s"
                raise LostWorkerError(f"{late}, such as {name(request)}")
            try:
                answer, spans = worker.pipe.recv()
            except (EOFError, OSError) as lost:
                worker.process.join(1)
                status = worker.process.exitcode
                raise LostWorkerError(
                    f"worker {worker.process.pid} ended with status {status}"
                ) from lost
            room = memoryview(next(worker.rooms) or b"")
            result, error = pickle.loads(
                answer, buffers=[room[start:stop] for start, stop in spans]
            )
            if error is not None:
                if memory_ran_out(error):
                    raise LostWorkerError(str(error) or "memory ran out") from error
                raise error
            ask(worker)
            yield result
    finally:
        kill_all(processes)


def _work(
    parent: int, function: Callable[[Any], Any], pipe: Connection, rooms: Sequence[mmap.mmap]
) -> None:
    """Answer requests until this process is killed."""
    # Leave alone what the parent had: touching shared memory would copy it.
    gc.freeze()
    go_deaf()  # Ctrl-C and signals to the process group reach every process; the parent decides
    die_with_parent(parent)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    # Parent and worker take the rooms in turn from the first, so an answer need not say which one
    # it is in.
    for number in count():
        request = pipe.recv()
        answer: tuple[Any, Exception | None]
        try:
            answer = function(request), None
        except Exception as error:
            if not isinstance(error, DistapError):
                error.add_note(traceback.format_exc())
            answer = None, error
        arrays = list[pickle.PickleBuffer]()
        text = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append if rooms else None)
        spans = list[tuple[int, int]]()
        stop = 0
        for raw in (array.raw() for array in arrays):
            start = -(-stop // ALIGNED) * ALIGNED
            spans.append((start, stop := start + raw.nbytes))
        if stop > ROOM:
            text = pickle.dumps(answer, protocol=5)
            spans = []
            arrays = []
        for (start, stop), array in zip(spans, arrays, strict=True):
            rooms[number % len(rooms)][start:stop] = array.raw()
        pipe.send((text, spans))


def kill_all(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)  # takes longer only if the kernel itself is stuck
    workers.clear()
