"""Batches of classes that lie near each other."""

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from distap.data.plan import Classes, Samples, turns
from distap.data.sampling.random_images import TwoOrMore
from distap.data.sampling.some_of_each import CLASSES, SomeOfEach


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

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """Return (B,) sample numbers, class by class.

        They are those of p_by_k until the images are described.
        """
        usable = data.with_pairs
        nearest = np.arange(data.count)[:, None] if data.nearest is None else data.nearest
        groups = -(-self.classes // nearest.shape[1])
        places = turns(len(usable), groups, step, CLASSES, seed)
        order = (nearest[usable[chosen]].reshape(-1) for chosen in places)
        return self.draw(data, order, seed, step)
