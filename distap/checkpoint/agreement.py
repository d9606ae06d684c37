"""Let some ranks work while the others wait, and raise on all ranks if the work fails on any."""

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, TypeVar

from distap.checkpoint.manifest import DamagedCheckpointError
from distap.errors import FAILED, DistapError
from distap.processes.forks import in_daemon
from distap.storage.remotes import UnreachableError
from distap.world import World

MEETING_SECONDS = 0.2
T = TypeVar("T")
# Errors that all ranks raise, the gravest first: the gravest failure of any rank decides.
_KINDS = (RuntimeError, DistapError, UnreachableError, DamagedCheckpointError)


def on_all(world: World, work: Callable[[], Any], mine: bool = True) -> list[Any]:
    """Run `work` on the ranks for which `mine` is true; return all ranks' results, None for the
    others.

    The work returns a value that JSON can hold, and may take any time: it has a thread of its own,
    and the ranks meet in short collectives meanwhile, so that none of these times out.

    Raises:
        DistapError: the work failed on some ranks; UnreachableError if starting again may help each
            of them, and DamagedCheckpointError if each has found damage.
        RuntimeError: the program failed on another rank; on that rank, its own error.
    """
    # A daemon, since a rank that has to leave must not wait for a network. Alone, it works in this
    # thread, in which a caller may have set torch's default device.
    done = in_daemon(work if mine else lambda: None, "distap-agreement", here=world.size == 1)
    while not world.all_agree(bool(wait([done], MEETING_SECONDS).done)):
        pass
    problem = done.exception()
    told = (
        [None, [_kind(problem), str(problem) or type(problem).__name__]]
        if problem
        else [done.result(), None]
    )
    answers = world.gather_values(told)
    failures = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
    if failures:
        if problem is not None and _kind(problem) == 0:
            raise problem  # its traceback is wanted
        texts = [
            f"{world.called(rank)}: {text}" if world.size > 1 else text
            for rank, (_, text) in failures.items()
        ]
        error = _KINDS[min(kind for kind, _ in failures.values())]("; ".join(texts))
        if isinstance(error, DistapError):
            error.is_on_all_ranks = world.size > 1
        raise error from problem
    return [result for result, _ in answers]


def first_on_rank_0(world: World, build: Callable[[], T]) -> T:
    """Call `build` on rank 0 first, then on the other ranks, so that errors and downloads happen
    only once.
    """
    built: list[T] = []
    on_all(world, lambda: built.append(build()), mine=world.rank == 0)
    return built[0] if built else build()


def _kind(problem: BaseException) -> int:
    if isinstance(problem, DamagedCheckpointError):
        return 3
    if isinstance(problem, DistapError):
        return 2 if problem.status == FAILED else 1
    # A disk's error is told like a mistake that a person can mend; any other is a fault of the
    # program.
    return 1 if isinstance(problem, OSError) else 0
