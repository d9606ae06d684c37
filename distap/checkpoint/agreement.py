"""Work that some ranks do while the others wait, and whose failure all of them learn of."""

import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from distap.errors import FAILED, DistapError
from distap.storage.remotes import UnreachableError
from distap.world import World

POLL_SECONDS = 0.2


def on_all(world: World, work: Callable[[], Any], mine: bool = True) -> list[Any]:
    """What `work` returned on each rank, None where it is not a rank's own to do; however long it takes.

    The ranks that wait meet in collectives meanwhile, so that no time-out of theirs is that of the work.

    Args:
        world: the ranks; all of them call this.
        work: returns what JSON can hold.
        mine: whether this rank does it.
    Raises:
        DistapError: it failed on a rank; on all of them then.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work() if mine else None, None))
        except Exception as error:
            answers.put((None, error))

    # A daemon, since a rank that is to leave must not wait for a network.
    thread = threading.Thread(target=run, name="distap-store", daemon=True)
    thread.start()
    thread.join(POLL_SECONDS)
    while not world.all_agree(not thread.is_alive()):
        thread.join(POLL_SECONDS)
    result, problem = answers.get()
    told = None if problem is None else [getattr(problem, "status", FAILED), str(problem) or type(problem).__name__]
    told_by_all = [json.loads(text) for text in world.gather_texts([json.dumps([result, told])], world.size)]
    if problem is not None:
        raise problem
    for rank, (_, of_rank) in enumerate(told_by_all):
        if of_rank is not None:
            kind = UnreachableError if of_rank[0] == FAILED else DistapError
            raise kind(f"rank {rank}: {of_rank[1]}")
    return [result for result, _ in told_by_all]
