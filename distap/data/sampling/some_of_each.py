"""P classes with K images each: what the samplings that take some of each class share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from distap.data.plan import Classes, Samples
from distap.data.sampling.in_turns import InTurns
from distap.data.sampling.random_images import TwoOrMore
from distap.errors import DistapError
from distap.randomness import Numbers, permutation, shuffled

# First words of random keys; no two uses share one. Another module draws the classes.
CLASSES = 18
WITHIN_CLASS = 12
COMPANY = 20


@dataclass(frozen=True)
class SomeOfEach(InTurns):
    """Take P classes and K images of each."""

    classes: PositiveInt = 64
    """Number P of classes in a global batch."""
    images: TwoOrMore = 4
    """Number K of images of each class."""

    unit: ClassVar[str] = "classes"
    words: ClassVar[int] = CLASSES

    @property
    def size(self) -> int:
        return self.classes * self.images

    @property
    def demand(self) -> str:
        """The images of a batch in words, for messages."""
        return f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch"

    def most_units(self, data: Classes) -> int:
        return data.most(self.images)

    def check(self, data: Classes) -> None:
        self.require_shards(data)
        usable = len(data.with_pairs)
        if self.classes > usable:
            raise DistapError(
                "sampling.too_few_classes",
                f"sampling.classes is {self.classes}, but only {usable} classes have two images or"
                f" more: set it to {usable} or less",
            )
        available = data.available(data.with_pairs, self.images)
        if self.size > max(2 * usable, available):
            raise DistapError(
                "sampling.too_few_images",
                f"{self.demand}, but with at most {self.images} a class the data set has only"
                f" {available}: take fewer",
            )
        if data.leaves_one(self.size):
            raise DistapError(
                "sampling.lone_image",
                f"{self.demand}, an odd number, but no class has more than two images, so one of"
                " each batch would be alone in its class: set sampling.classes or sampling.images"
                " to an even number",
            )

    def draw(
        self,
        data: Classes,
        order: Iterator[Numbers],
        seed: int,
        step: int,
        total: int,
        pool: Numbers | None = None,
    ) -> Samples:
        """Return (total,) up to K random samples per class, in the order of turns.

        The class that fills the batch up gives two samples at least; see `_with_company`.

        Args:
            order: yields the numbers of the next classes, without end.
            total: number of samples.
            pool: classes that may be drawn in place of others; by default all with two samples.
        """
        pool = data.with_pairs if pool is None else pool
        needed = np.empty(0, dtype=np.int64)
        while data.available(needed, self.images) < total:
            longer = np.concatenate([needed, next(order)])
            # each class once, in this order
            needed = longer[np.sort(np.unique(longer, return_index=True)[1])]
        limits = np.minimum(data.sizes[needed], self.images)
        takes = np.minimum(limits, total - (np.cumsum(limits) - limits))
        needed = needed[takes > 0]
        takes = takes[takes > 0]

        if takes[-1] == 1:
            unused = np.setdiff1d(pool[np.minimum(data.sizes[pool], self.images) > 2], needed)
            unused = unused[permutation(len(unused), COMPANY, seed, step)]
            needed, takes = _with_company(needed, takes, int(limits[len(needed) - 1]), unused)

        sizes = data.sizes[needed]
        # A class of fewer than K images repeats its last place up to K, which the mask in the last
        # line drops.
        columns = np.arange(self.images)
        places = np.minimum(columns, sizes[:, None] - 1)
        places = shuffled(sizes, places, WITHIN_CLASS, seed, step, of=(needed,))
        return data.nth(needed[:, None], places)[columns < takes[:, None]]


def _with_company(
    needed: Numbers, takes: Numbers, limit: int, unused: Numbers
) -> tuple[Numbers, Numbers]:
    """Return classes and their numbers of images, with no class whose image would be alone.

    Args:
        needed: classes in order, of which the last one gives a single image.
        takes: images of each.
        limit: images that the last class can give.
        unused: other classes that can give three.
    """
    generous = np.flatnonzero(takes[:-1] > 2)
    if len(generous):
        takes = takes.copy()
        takes[generous[-1]] -= 1
        takes[-1] += 1
        return needed, takes
    # All others give two, so the batch is odd: one class with three takes the place of two.
    third = needed[-1:] if limit > 2 else unused[:1]
    if not len(third):
        return needed, takes
    return np.append(needed[:-2], third), np.append(takes[:-2], 3)
