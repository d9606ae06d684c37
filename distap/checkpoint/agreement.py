"""Let some ranks work while the others wait, and raise the same error on all ranks if the work fails on any."""

import json
import threading
from collections.abc import Callable
from typing import Any

from distap.errors import FAILED, MISTAKE, DistapError
from distap.storage.remotes import UnreachableError
from distap.world import World

POLL_SECONDS = 0.2


def agreed(world: World, work: Callable[[], Any], mine: bool = True) -> list[Any]:
    """Do the work on the ranks for which `mine` is true, and return all ranks' results, None for the others.

    The ranks wait for the slowest in one collective, so that its time-out limits the work.

    Args:
        world: the ranks, which all call this.
        work: returns a value that JSON can hold.
        mine: whether this rank does the work.
    Raises:
        DistapError: it failed on some ranks; UnreachableError if another attempt may help each of them.
    """
    return _exchanged(world, *_outcome(work, mine))


def on_all(world: World, work: Callable[[], Any], mine: bool = True) -> list[Any]:
    """Do the same as `agreed` for work of any length, such as a download.

    The work has a thread of its own. Meanwhile the ranks meet in short collectives, so that none times out.
    """
    outcomes: list[tuple[Any, Exception | None]] = []
    # A daemon, since a rank that has to leave must not wait for a network.
    thread = threading.Thread(target=lambda: outcomes.append(_outcome(work, mine)), name="distap-store", daemon=True)
    thread.start()
    thread.join(POLL_SECONDS)
    while not world.all_agree(not thread.is_alive()):
        thread.join(POLL_SECONDS)
    return _exchanged(world, *outcomes[0])


def _outcome(work: Callable[[], Any], mine: bool) -> tuple[Any, Exception | None]:
    try:
        return (work() if mine else None), None
    except Exception as error:
        return None, error


def _exchanged(world: World, result: Any, problem: Exception | None) -> list[Any]:
    """Gather the results of all ranks, or raise what failed on any of them."""
    told = None
    if problem is not None:
        status = getattr(problem, "status", MISTAKE if isinstance(problem, OSError) else FAILED)
        told = [status, str(problem) or type(problem).__name__]
    answers = [json.loads(text) for text in world.gather_texts([json.dumps([result, told])], world.size)]
    failures = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
    if failures:
        if problem is not None and not isinstance(problem, (DistapError, OSError)):
            raise problem  # an error of the program, whose traceback is wanted
        texts = [f"rank {rank}: {text}" if world.size > 1 else text for rank, (_, text) in failures.items()]
        kind = UnreachableError if all(status == FAILED for status, _ in failures.values()) else DistapError
        raise kind("; ".join(texts)) from problem
    return [result for result, _ in answers]
