"""Let some ranks work while the others wait, and raise on all ranks if the work fails on any."""

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, NoReturn, TypeVar

from distap.checkpoint.manifest import DamagedCheckpointError
from distap.errors import FAILED, DistapError
from distap.processes.forks import in_daemon
from distap.storage.remotes import UnreachableError
from distap.world import World

MEETING_SECONDS = 0.2
T = TypeVar("T")
# Errors that all ranks raise, by their gravity: the gravest failure of any rank decides. The
# gravest of all, 0, is a fault of the program.
_KINDS = (DistapError, UnreachableError, DamagedCheckpointError)


def on_all(world: World, work: Callable[[], Any], takes_part: bool = True) -> list[Any]:
    """Run `work` on the ranks that take part; return all ranks' results, None for the others.

    The work returns a value that JSON can hold, and may take any time: it has a thread of its own,
    and the ranks meet in short collectives meanwhile, so that none of these times out.

    Raises:
        DistapError: the work failed on some ranks; UnreachableError if starting again may help each
            of them, and DamagedCheckpointError if each has found damage.
        RuntimeError: the program failed on another rank; on that rank, its own error.
    """
    # A daemon, since a rank that has to leave must not wait for a network. Alone, it works in this
    # thread, in which a caller may have set torch's default device.
    task = work if takes_part else lambda: None
    done = in_daemon(task, "distap-agreement", here=world.size == 1)
    while not world.all_agree(bool(wait([done], MEETING_SECONDS).done)):
        pass

    problem = done.exception()
    answer = [done.result(), None] if problem is None else [None, _failure(problem)]
    answers = world.gather_values(answer)
    failures = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
    if failures:
        _raise(world, failures, problem)
    return [result for result, _ in answers]


def on_rank_0(world: World, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0, as `on_all` does; return its result on all ranks."""
    return on_all(world, work, takes_part=world.rank == 0)[0]


def first_on_rank_0(world: World, build: Callable[[], T]) -> T:
    """Call `build` on rank 0 first, then on the other ranks: errors and downloads happen once."""
    built: list[T] = []
    on_rank_0(world, lambda: built.append(build()))
    return built[0] if built else build()


def _failure(problem: BaseException) -> tuple[int, str, str]:
    """Return the gravity of an error, its code and its text."""
    text = str(problem) or type(problem).__name__
    if isinstance(problem, DamagedCheckpointError):
        return 3, problem.code, text
    if isinstance(problem, DistapError):
        return 2 if problem.status == FAILED else 1, problem.code, text
    # A disk's error is reported like a mistake that a person can mend; any other is a fault of the
    # program.
    return int(isinstance(problem, OSError)), "storage.failed", text


def _raise(
    world: World, failures: dict[int, tuple[int, str, str]], problem: BaseException | None
) -> NoReturn:
    """Raise the gravest of all ranks' failures from this rank's own problem."""
    if problem is not None and _failure(problem)[0] == 0:
        raise problem  # its traceback is wanted
    kind, code, text = min(failures.values())
    if world.size > 1:
        texts = [f"{world.called(rank)}: {text}" for rank, (_, _, text) in failures.items()]
        text = "; ".join(texts)
    if kind == 0:
        raise RuntimeError(text) from problem
    error = _KINDS[kind - 1](code, text)
    error.is_on_all_ranks = world.size > 1
    raise error from problem
