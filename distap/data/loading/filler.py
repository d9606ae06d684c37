"""Fetch the shards of the next steps into a host's cache, in a process of its own."""

import os
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np

from distap.data.loading.cached import CachedShards
from distap.data.shards.parallel import begin_worker
from distap.errors import DistapError, logger
from distap.processes.forks import forking_context

DOWNLOADS = 4  # shards that a rank fetches at once
SCANNED_STEPS = 50  # whose shards are looked up before the next shards are fetched
POLL_SECONDS = 0.05
COUNTED = ("requests", "read_bytes", "used_bytes", "retries")


class Filler:
    """A process that fetches this rank's shards ahead; it ends with `close`."""

    def __init__(self, shards: CachedShards, steps: range) -> None:
        context = forking_context()
        # The step that is trained, and what was counted so far.
        # Without a lock, which a process that is killed would hold for ever.
        self._shared = context.Array("q", [steps.start] + [0] * len(COUNTED), lock=False)
        self._reported = Counter[str]()
        self.process = context.Process(
            target=_fill, args=(os.getpid(), shards, steps, self._shared), daemon=True
        )
        self.process.start()
        self._is_lost = False

    def at(self, step: int) -> Counter[str]:
        """Note which step is trained; return what was read since the last call."""
        self._shared[0] = step
        counts = Counter(dict(zip(COUNTED, self._shared[1:], strict=True)))
        new = counts - self._reported
        self._reported = counts
        if not self.process.is_alive() and not self._is_lost:
            self._is_lost = True
            logger.warning(
                "data.cache: the process that fetches shards ahead was lost (status %s; memory may"
                " have run out); loader workers fetch shards now, when they need them, until the"
                " training starts again",
                self.process.exitcode,
            )
        return new

    def close(self) -> None:
        self.process.kill()
        self.process.join(1)


class _Lookahead:
    """The shards that a rank's next steps need."""

    def __init__(self, shards: CachedShards, steps: range) -> None:
        self._shards = shards
        self._steps = steps
        self._scanned = deque[tuple[int, list[int]]]()
        self._sizes = shards.sizes
        plan = shards.plan
        # Two passes over the data hold every shard that a rank takes.
        self._horizon = SCANNED_STEPS + 2 * -(-len(plan.classes) // plan.sampling.size)
        self._total = len(self._sizes)
        if getattr(plan.sampling, "window", None) is None:  # the same shards in each pass
            self._total = int(shards.shards(0, of_rank=True).sum())
        self.is_complete = False  # whether no further step needs to be looked at now

    def wanted(self, step: int) -> list[int]:
        """Return the shards from a step on, by next use, a little more than the cache holds."""
        while self._scanned and self._scanned[0][0] < step:
            self._scanned.popleft()
        wanted = dict.fromkeys(chain.from_iterable(shards for _, shards in self._scanned))
        room = 2 * self._shards.cache.limit - int(self._sizes[list(wanted)].sum())
        first = self._scanned[-1][0] + 1 if self._scanned else step
        last = min(self._steps.stop, step + self._horizon)
        for ahead in range(first, min(first + SCANNED_STEPS, last)):
            if room <= 0 or len(wanted) == self._total:
                break
            shards = self._of_step(ahead)
            self._scanned.append((ahead, shards))
            room -= int(self._sizes[[shard for shard in shards if shard not in wanted]].sum())
            wanted |= dict.fromkeys(shards)
            first = ahead + 1
        self.is_complete = room <= 0 or len(wanted) == self._total or first == last
        return list(wanted)

    def _of_step(self, step: int) -> list[int]:
        plan = self._shards.plan
        shards = np.unique(plan.classes.shards_of(plan.batch(step)))
        numbers: list[int] = shards[self._shards.shards(step, of_rank=True)[shards]].tolist()
        return numbers


class _Fetches:
    """Shards that are fetched at once, as long as there is room for them."""

    def __init__(self, shards: CachedShards) -> None:
        self._shards = shards
        self._threads = ThreadPoolExecutor(DOWNLOADS)
        self.under_way = dict[int, Future[bool]]()
        self._has_room = True  # for shards that are wanted later than those which are here

    def start(self, wanted: list[int]) -> None:
        """Start to fetch the first of the wanted shards that are not here."""
        for shard in wanted if self._has_room else []:
            if len(self.under_way) == DOWNLOADS:
                return
            if shard not in self.under_way and not self._shards.is_here(shard):
                self.under_way[shard] = self._threads.submit(self._fetch, shard)

    def end(self, anew: bool) -> None:
        """Forget the fetches that have ended; start no more without room, unless `anew`."""
        for shard, fetch in list(self.under_way.items()):
            if fetch.done():
                del self.under_way[shard]
                self._has_room &= fetch.result()
        self._has_room |= anew

    def _fetch(self, shard: int) -> bool:
        try:
            return self._shards.fetch(shard)
        except DistapError as error:  # a worker that needs the shard raises it
            logger.warning("data.cache: %s", error)
            return False


def _fill(parent: int, shards: CachedShards, steps: range, shared: Any) -> None:
    """Fetch shards, and count what was read, until this process is killed."""
    begin_worker(parent)
    shards.images.drained()
    lookahead = _Lookahead(shards, steps)
    fetches = _Fetches(shards)
    counts = Counter[str]()
    while True:
        step = shared[0]
        wanted = lookahead.wanted(step)
        shards.want(wanted)
        fetches.start(wanted)
        is_idle = lookahead.is_complete and not fetches.under_way
        time.sleep(POLL_SECONDS)
        while is_idle and shared[0] == step:
            time.sleep(POLL_SECONDS)
        fetches.end(anew=shared[0] != step)
        counts += shards.images.drained()
        shared[1:] = [counts[name] for name in COUNTED]
