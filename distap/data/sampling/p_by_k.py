"""Batches of P classes with K images each."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from distap.data.plan import Classes, Samples
from distap.data.sampling.every_class import ClassesSampling
from distap.data.sampling.in_turns import windows_of_classes
from distap.data.sampling.some_of_each import SomeOfEach
from distap.data.turns import Turn, turns
from distap.data.windows import Windows
from distap.errors import DistapError
from distap.randomness import permutation

MIXED = 19  # first word of random keys; no two uses share one


@dataclass(frozen=True)
class PByKSampling(SomeOfEach):
    """Take P classes and K images of each, as Smooth-AP and ROADMAP train, with a new order of
    classes each epoch.

    Classes with fewer than K images give all they have, and the classes that follow fill the rest,
    the last of them with two images at least, for one alone would be no query. Each class has its
    turn once in an epoch, also if P does not divide their number. With fewer than 2 P classes there
    are no epochs: each batch draws its classes anew.
    """

    balance: int | None = None
    """Level of coarser classes, from 1, each of which provides as many of the P classes as the
    others, or all it has; null takes no account of them."""

    def check(self, data: Classes) -> None:
        levels = data.levels.shape[1]
        if self.balance is not None and not 1 <= self.balance <= levels:
            raise DistapError(
                "sampling.unknown_level",
                f"sampling.balance is {self.balance}; the index has {levels} levels of coarser"
                " classes",
            )
        if self.balance is not None:
            self.refuse_window("sampling.balance takes the classes of a batch from all shards")
        super().check(data)

    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        """Return the sample numbers of the classes whose turn it is, class by class."""
        usable = data.with_pairs
        if self.balance is None:
            windows = self.windows(data)
            places = turns(len(usable), turn, self.words, seed, windows=windows)
        else:
            # The classes of this level share out the P classes as classes share out the images of a
            # batch.
            level = _of_level(data, self.balance)
            evenly = ClassesSampling(turn.longest)
            places = (
                evenly.batch(level, seed, batch)[permutation(turn.longest, MIXED, seed, batch)]
                for batch in count(turn.batch)
            )
        order = (usable[chosen] for chosen in places)
        return self.draw(data, order, seed, turn.batch, total=turn.takes * self.images)

    def windows(self, data: Classes) -> Windows | None:
        return windows_of_classes(data, self.window)


@lru_cache(maxsize=32)
def _of_level(data: Classes, level: int) -> Classes:
    """Return the classes with two or more samples as the samples of their coarser classes."""
    numbers = data.numbers[data.with_pairs, level]
    return Classes(np.unique(numbers, return_inverse=True)[1].reshape(-1))
