"""Batches of random images, and batches with images of every class."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from distap.data.plan import Classes, Samples, in_turn, turns
from distap.errors import DistapError
from distap.randomness import permutation

IMAGE_ORDER, TURN, EXTRA_TURN = 11, 14, 15  # first words of random keys; no two uses share one


@dataclass(frozen=True)
class RandomSampling:
    """Cut random orders of all images, one after the other, into batches.

    Each image comes once in an epoch, and none twice in a batch: where a batch holds the end of an epoch and the
    beginning of the next, images of the end come a little later in the next. A data set of less than two batches has
    no epochs; each batch is drawn anew.
    """

    batch_size: Annotated[int, Field(ge=2)] = 4096
    """Number B of images in a global batch."""

    @property
    def size(self) -> int:
        return self.batch_size

    def check(self, data: Classes) -> None:
        if self.batch_size > len(data):
            only = f"the data set has only {len(data)} images and no image may be in a batch twice"
            raise DistapError(f"sampling.batch_size is {self.batch_size}, but {only}: set it to {len(data)} or less")

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        return next(turns(len(data), self.batch_size, step, IMAGE_ORDER, seed))


@dataclass(frozen=True)
class ClassesSampling(RandomSampling):
    """Take every class in every batch, as Revaud et al. 2019 train on Landmarks.

    The K classes share the B images as evenly as possible: a class gives its share, or all it has, and the larger
    classes make up for the rest. If that leaves shares of L and of L + 1, the larger share goes round. All images of
    a class are used, in a random order, before any of them is used again. B is at least twice the number of classes.
    """

    def check(self, data: Classes) -> None:
        if self.batch_size < 2 * data.count:
            raise DistapError(
                f"sampling.batch_size is {self.batch_size}, but sampling by classes takes two images at least of "
                f"each of the {data.count} classes: set it to {2 * data.count} or more, or choose p_by_k"
            )
        super().check(data)

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        level, larger = _shares(data, self.batch_size)
        takes = np.minimum(data.sizes, level)
        starts = step * takes
        extra = self.batch_size - int(takes.sum())
        if extra:
            # Deal the extra images out like cards, in one fixed order of the larger classes. So the number of images
            # that a class has given before this step follows from the step alone.
            order = larger[permutation(len(larger), EXTRA_TURN, seed)]
            # Before this step, step * extra images were dealt: the class at place j of `order` got one of each full
            # round, and one more if j comes before the place where the next is dealt. That is ceil((dealt - j) / n).
            starts[order] -= (np.arange(len(larger)) - step * extra) // len(larger)
            takes[order[(step * extra + np.arange(extra)) % len(larger)]] += 1
        labels = np.arange(data.count)
        drawn = in_turn(data.sizes, starts, takes, level + bool(extra), TURN, seed, of=labels)
        return data.nth(np.repeat(labels, takes), drawn)


@lru_cache(maxsize=2)
def _shares(data: Classes, total: int) -> tuple[int, NDArray[np.int64]]:
    """Return how many images each class gives of `total` (or all its images), and which classes have more."""
    sizes = np.sort(data.sizes)
    # If the k smallest classes give all they have, levels[k] is what each of the others would have to give. The first
    # k whose next class is larger than that is the answer.
    given_before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    levels = (total - given_before) // (len(sizes) - np.arange(len(sizes)))
    stuck = np.flatnonzero(levels < sizes)
    level = int(levels[stuck[0]]) if len(stuck) else int(sizes[-1])
    return level, np.flatnonzero(data.sizes > level)
