"""Mix the elements of a data set within windows of shards: a block shuffle.

A batch at random from all shards needs all of them at any time. Mixed within windows, it needs the
shards of a window only, each for a short while, so that a host can fetch whole shards ahead and
drop them (Dryden et al., SC 2021, do so for a plan that is a table; this one is a function).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from distap.randomness import Numbers, permutation, shuffled

# First words of random keys; no two uses share one.
SHARDS_OF_ROUND = 22
WITHIN_WINDOW = 23


@dataclass(frozen=True, eq=False)  # cached by itself
class Windows:
    """N elements, such as classes, in windows of `length` of the shards that hold them.

    In each round the shards come in a random order, and the elements of each window in a random
    order. With a length of 2:

        shards      3 0             | 4 1             | 2
        elements    those of 0 and 3 | those of 1 and 4 | those of 2, each mixed
    """

    shards: Numbers  # (N,) shard of each element
    length: int

    @cached_property
    def _by_shard(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the S shards that hold elements, (N,) elements by shard, (S + 1,) their ends."""
        counts = np.bincount(self.shards)
        numbers = np.flatnonzero(counts)
        elements = np.argsort(self.shards, kind="stable")
        return numbers, elements, np.concatenate([[0], np.cumsum(counts[numbers])])

    def elements(self, round_number: int, places: Numbers, key: tuple[int, ...]) -> Numbers:
        """Return the elements at (n,) places of round `round_number`, by the key."""
        _, by_shard, first = self._by_shard
        order, ends, window_ends = _round(self, round_number, key)
        window = np.searchsorted(window_ends, places, side="right") - 1
        begin = window_ends[window]
        mixed = shuffled(
            window_ends[window + 1] - begin,
            (places - begin)[:, None],
            WITHIN_WINDOW,
            *key,
            of=(window, np.full_like(window, round_number)),
        )[:, 0]
        # From the place in the window to the shard that stands there, and the place within it.
        mixed = mixed + begin
        shard = np.searchsorted(ends, mixed, side="right") - 1
        elements: Numbers = by_shard[first[order[shard]] + mixed - ends[shard]]
        return elements

    def spread(self, round_number: int, shards: int, key: tuple[int, ...]) -> NDArray[np.float64]:
        """Return (shards,) where in its window's elements the middle of each shard lies, 0 to 1."""
        numbers, _, _ = self._by_shard
        order, ends, window_ends = _round(self, round_number, key)
        middle = (ends[:-1] + ends[1:]) / 2
        window = np.arange(len(order)) // self.length
        begin = window_ends[window]
        spread = np.zeros(shards)
        spread[numbers[order]] = (middle - begin) / (window_ends[window + 1] - begin)
        return spread


@lru_cache(maxsize=8)
def _round(
    windows: Windows, round_number: int, key: tuple[int, ...]
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the order of a round's shards, and where they and the windows end, each from 0 on.

    The order (S,) counts the shards that hold elements; their ends are (S + 1,), the windows' one
    more than the windows are.
    """
    _, _, first = windows._by_shard
    sizes = np.diff(first)
    order = permutation(len(sizes), SHARDS_OF_ROUND, *key, round_number)
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    last_shards = np.arange(0, len(sizes) + windows.length, windows.length)
    window_ends = ends[np.minimum(last_shards, len(sizes))]
    return order, ends, window_ends
