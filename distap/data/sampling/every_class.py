"""Batches of every class, as evenly as possible."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from distap.data.plan import Classes, Samples
from distap.data.sampling.random_images import RandomSampling
from distap.data.turns import Turn, in_turn
from distap.errors import DistapError
from distap.randomness import Numbers, permutation

# First words of random keys; no two uses share one.
TURN = 14
EXTRA_TURN = 15


@dataclass(frozen=True)
class ClassesSampling(RandomSampling):
    """Take every class in every batch, as Revaud et al. 2019 train on Landmarks.

    The K classes share the B images as evenly as possible: a class gives its share, or all it has,
    and the larger classes make up for the rest. If that leaves shares of L and of L + 1, the larger
    share goes round. All images of a class are used, in a random order, before any of them is used
    again. B is at least twice the number of classes.
    """

    may_vary: ClassVar[bool] = False  # for what a class gave before follows from the step alone

    def check(self, data: Classes) -> None:
        self.refuse_window("`classes` takes some of every class in every batch, from every shard")
        needed = 2 * data.count
        if self.batch_size < needed:
            raise DistapError(
                "sampling.too_small",
                f"sampling.batch_size is {self.batch_size}, but `classes` takes two of each of"
                f" {data.count} classes: set it to {needed} or more, or choose p_by_k",
            )
        super().check(data)

    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        step = turn.batch
        level, larger = _shares(data, self.batch_size)
        takes = np.minimum(data.sizes, level)
        starts = step * takes
        extra = self.batch_size - int(takes.sum())
        if extra:
            # Deal the extra images out like cards, in one fixed order of the larger classes. So the
            # number of images that a class has given before this step follows from the step alone.
            order = larger[permutation(len(larger), EXTRA_TURN, seed)]
            # Before this step, step * extra images were dealt: the class at place j of `order` got
            # one of each full round, and one more if j comes before the place where the next is
            # dealt. That is ceil((dealt - j) / n).
            starts[order] -= (np.arange(len(larger)) - step * extra) // len(larger)
            takes[order[(step * extra + np.arange(extra)) % len(larger)]] += 1

        labels = np.arange(data.count)
        longest = level + bool(extra)
        places = in_turn(data.sizes, starts, takes, longest, key=(TURN, seed), numbers=labels)
        return data.nth(np.repeat(labels, takes), places)


@lru_cache(maxsize=32)
def _shares(data: Classes, total: int) -> tuple[int, Numbers]:
    """Return how many of `total` images each class gives, at most, and the classes with more."""
    sizes = np.sort(data.sizes)
    # If the k smallest classes give all they have, levels[k] is the share of each other class. The
    # first k whose next class is larger than that is the answer. Three classes of 1, 3 and 9 images
    # share out 8: levels are 8 // 3, 7 // 2 and 4 // 1, that is 2, 3 and 4; 1 < 2 and 3 = 3, but
    # 9 > 4, so the answer is 4, which the third class gives.
    smaller = np.cumsum(sizes) - sizes
    levels = (total - smaller) // (len(sizes) - np.arange(len(sizes)))
    larger = np.flatnonzero(levels < sizes)
    level = int(levels[larger[0]]) if len(larger) else int(sizes[-1])
    return level, np.flatnonzero(data.sizes > level)
