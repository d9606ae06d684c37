"""Spread work over processes that end with their parent, and show its progress."""

import faulthandler
import gc
import mmap
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate, cycle
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar, cast

from distap.errors import FAILED, DistapError, memory_ran_out
from distap.processes.forks import die_with_parent, forking_context, stop_listening
from distap.processes.stopping import go_deaf

Job = TypeVar("Job")
Result = TypeVar("Result")
ALIGNED = 64  # bytes to which an array in shared memory is aligned
# bytes of shared memory for an answer's arrays; more go through a pipe. Unused, it takes no memory
ROOM = 2**28
LONGEST_WAIT = 600.0  # seconds for the next images
STANDARD_ERROR = 2  # number of the open file, whatever `sys.stderr` is
# A worker prints where its threads wait. Not SIGUSR1, which launchers block and workers ignore.
STACKS_SIGNAL = signal.SIGUSR2
NO_REQUEST = None  # what a worker receives in place of a request when there are no more

# Wraps a loop over (items, description, total): yields the items unchanged and shows the progress.
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


class LostWorkerError(DistapError):
    """A worker process has died or hangs."""

    status = FAILED


def _lost(problem: str) -> LostWorkerError:
    return LostWorkerError(
        "run.lost_worker",
        f"a process was lost: {problem}. Usual causes, unless a reason is printed above: the"
        " storage hangs; or the host's memory was used up (see its kernel log): lower"
        " data.workers (or --workers), data.prefetch or data.pixels.memory_bytes",
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
    description: str = "",
    track: Track = untracked,
) -> list[Result]:
    """Return the results of jobs in order, from up to `workers` processes.

    This process does the work if one is enough. After an error or Ctrl-C, or if this process dies,
    the workers end at once, in the middle of their jobs. The function and its errors must be
    picklable. A worker that is killed raises a DistapError.
    """
    workers = min(workers, len(jobs))
    with closing(in_processes(function, jobs, workers if workers > 1 else 0)) as results:
        return list(track(results, description, len(jobs)))


class Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection
    # shared memory for the arrays of its answers, one after the other
    rooms: Iterator[mmap.mmap | None]

    def answer(self, longest_wait: float | None, request: Job, name: Callable[[Job], str]) -> Any:
        """Return the next answer, or raise its error.

        Raises:
            LostWorkerError: the worker has died or run out of memory, or needs more than
                `longest_wait` seconds for the request that `name` describes.
        """
        if not wait([self.pipe, self.process.sentinel], longest_wait):
            os.kill(cast(int, self.process.pid), STACKS_SIGNAL)
            self.process.join(1)  # time to print them
            raise _lost(
                f"worker {self.process.pid} handed nothing over for {longest_wait:g} s, such as"
                f" {name(request)}"
            )
        try:
            text, spans = self.pipe.recv()
        except (EOFError, OSError) as broken:
            self.process.join(1)
            raise _lost(
                f"worker {self.process.pid} ended with status {self.process.exitcode}"
            ) from broken
        room = memoryview(next(self.rooms) or b"")
        result, error = pickle.loads(text, buffers=[room[start:stop] for start, stop in spans])
        if error is None:
            return result
        if memory_ran_out(error):
            raise _lost(str(error) or "memory ran out") from error
        raise error


@dataclass(frozen=True)
class Fetch:
    """A function of a request that waits for a disk or a store, to be called ahead by threads."""

    function: Callable[[Any], Any]
    ahead: int  # requests for which it is called while an earlier one is computed


class _Fetched:
    """Requests in order, each with the data that threads fetch for it meanwhile."""

    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(fetch.ahead) if fetch is not None else None
        self._waiting = deque[tuple[Any, Future[Any] | None]]()

    def add(self, request: Any) -> None:
        data = None
        if self._fetch is not None and self._threads is not None:
            data = self._threads.submit(self._fetch.function, request)
        self._waiting.append((request, data))

    def is_filled(self) -> bool:
        """Return whether more requests wait than are fetched ahead."""
        return len(self._waiting) > (0 if self._fetch is None else self._fetch.ahead)

    def compute(self, function: Callable[..., Result]) -> Result:
        """Compute the next request, which must be there."""
        request, data = self._waiting.popleft()
        return function(request) if data is None else function(request, data.result())

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _in_this_process(
    function: Callable[..., Result], requests: Iterable[Job], fetch: Fetch | None
) -> Iterator[Result]:
    with closing(_Fetched(fetch)) as fetched:
        for request in requests:
            fetched.add(request)
            if fetched.is_filled():
                yield fetched.compute(function)
        while len(fetched):
            yield fetched.compute(function)


def in_processes(
    function: Callable[..., Result],
    requests: Iterable[Job],
    workers: int,
    prefetch: int = 2,
    longest_wait: float | None = None,
    name: Callable[[Job], str] = str,
    lends: bool = False,
    fetch: Fetch | None = None,
) -> Generator[Result]:
    """Yield `function(request)` of each request in order, computed by worker processes.

    Worker w of n gets the requests w, w + n, w + 2 n, ... in order, `prefetch` of them ahead; with
    0 workers, this process does the work. The workers end with this generator. If a worker `lends`,
    NumPy's arrays in a result are in memory that both processes share, and are valid until the next
    result is taken. With `fetch`, it is `function(request, fetch.function(request))`, where the
    second argument of later requests is fetched while an earlier one is computed.

    Raises:
        LostWorkerError: a worker has died, or needs more than `longest_wait` seconds for the
            request that `name` describes.
    """
    if not workers:
        yield from _in_this_process(function, requests, fetch)
        return
    ahead = 0 if fetch is None else fetch.ahead
    context = forking_context()
    remaining = iter(requests)
    pending = deque[tuple[Job, Worker]]()
    processes = list[BaseProcess]()
    # The end of Python would wait for a worker that is stuck in a slow read.
    Finalize(None, kill_all, args=(processes,), exitpriority=0)

    def started() -> Worker:
        pipe, theirs = context.Pipe()
        # One more than answers that wait: a worker may fill it while the caller uses the answer
        # that came last.
        count = prefetch + 1 if lends and sys.platform == "linux" else 0
        rooms = list[mmap.mmap]()
        # On a host that promises no more memory than it has, arrays go through the pipe.
        with suppress(OSError):
            rooms = [mmap.mmap(-1, ROOM) for _ in range(count)]
        process = context.Process(
            target=_work, args=(os.getpid(), function, fetch, theirs, rooms), daemon=True
        )
        processes.append(process)
        process.start()
        # With the worker alone holding its end, its death is the end of the pipe, and recv raises
        # EOFError.
        theirs.close()
        return Worker(process, pipe, cycle(rooms or [None]))

    def send_next(worker: Worker) -> None:
        request = next(remaining, NO_REQUEST)
        with suppress(OSError):  # it has died, and its answers will be missed
            worker.pipe.send(request)
        if request is not NO_REQUEST:
            pending.append((request, worker))

    try:
        team = [started() for _ in range(workers)]
        # Each request that a worker gets allows it one answer; those ahead are only fetched for.
        for worker in team * (prefetch + ahead):
            send_next(worker)
        while pending:
            request, worker = pending.popleft()
            result = worker.answer(longest_wait, request, name)
            send_next(worker)
            yield result
    finally:
        kill_all(processes)


def begin_worker(parent: int) -> None:
    """Make this process, which was just forked, a worker of its parent."""
    # Leave alone what the parent had: touching shared memory would copy it.
    gc.freeze()
    faulthandler.enable(file=STANDARD_ERROR)
    # Not an abort, whose core dump would hold all the rooms.
    faulthandler.register(STACKS_SIGNAL, file=STANDARD_ERROR, all_threads=True)
    go_deaf()  # Ctrl-C and signals to the process group reach every process; the parent decides
    die_with_parent(parent)
    stop_listening()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _work(
    parent: int,
    function: Callable[..., Any],
    fetch: Fetch | None,
    pipe: Connection,
    rooms: Sequence[mmap.mmap],
) -> None:
    """Answer requests until this process is killed."""
    begin_worker(parent)
    fetched = _Fetched(fetch)
    ahead = 0 if fetch is None else fetch.ahead
    messages = 0
    # Parent and worker take the rooms in turn from the first, so an answer need not name its room.
    # Each message allows an answer, the first ones none: more answers would overwrite rooms.
    for answers, room in enumerate(cycle(rooms or [None])):
        while messages <= ahead + answers or not len(fetched):
            request = pipe.recv()
            messages += 1
            if request is not NO_REQUEST:
                fetched.add(request)
        answer: tuple[Any, Exception | None]
        try:
            answer = fetched.compute(function), None
        except Exception as error:
            if not isinstance(error, DistapError):
                error.add_note(traceback.format_exc())
            answer = None, error
        pipe.send(_pickled(answer, room))


def _pickled(answer: Any, room: mmap.mmap | None) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the pickle of an answer without its arrays, and where in the room each of them is."""
    # The arrays stand in the room one after the other, and the parent reads them where they are:
    #
    #     | array 0 ...... | padding | array 1 ... | padding | free
    #       0                          a multiple of ALIGNED
    if room is not None:
        buffers = list[pickle.PickleBuffer]()
        text = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        sizes = (-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)
        starts = list(accumulate(sizes, initial=0))
        if starts[-1] <= ROOM:
            spans = []
            for start, array in zip(starts, arrays, strict=False):
                spans.append((start, start + array.nbytes))
                room[start : start + array.nbytes] = array
            return text, spans
    return pickle.dumps(answer, protocol=5), []


def kill_all(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)  # takes longer only if the kernel itself is stuck
    workers.clear()
