"""Batches of classes that lie near each other."""

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from distap.data.plan import Classes, Samples
from distap.data.sampling.random_images import TwoOrMore
from distap.data.sampling.some_of_each import SomeOfEach
from distap.data.turns import Turn, turns


@dataclass(frozen=True)
class MinedSampling(SomeOfEach):
    """Take P classes in groups that lie near each other, so that negatives are hard, and K images
    of each.

    Classes take turns as in `p_by_k`, and each brings those whose mean descriptors are nearest to
    its own. As Gordo et al. 2017 and Radenović et al. 2019 mine negatives from a pool that is
    described again from time to time, the training describes all its images before the first step
    and after every `every` steps.
    """

    near: TwoOrMore = 8
    """Number of classes of a group."""
    every: PositiveInt = 100
    """Number of steps after which the training describes its images again."""

    def check(self, data: Classes) -> None:
        self.refuse_window("`mined` takes classes that look alike, from any shard")
        super().check(data)

    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        """Return the sample numbers of the classes whose turn it is, class by class.

        They are those of p_by_k until the images are described.
        """
        usable = data.with_pairs
        nearest = np.arange(data.count)[:, None] if data.nearest is None else data.nearest
        groups = -(-turn.longest // nearest.shape[1])
        of_groups = Turn(turn.batch, turn.batch * groups, groups, groups)
        places = turns(len(usable), of_groups, self.words, seed)
        order = (nearest[usable[chosen]].reshape(-1) for chosen in places)
        return self.draw(data, order, seed, turn.batch, total=turn.takes * self.images)
