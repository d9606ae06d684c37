"""Batches of P classes with K images."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples, epoch_order
from distap.errors import DistapError
from distap.randomness import permutation

WITHIN_CLASS = 12  # first word of the key that orders within a class are drawn with


@dataclass(frozen=True)
class PByKSampling:
    """Take P classes and K images of each, as Smooth-AP and ROADMAP train, with a new order of classes each epoch.

    Classes with fewer than K images give all they have, and the classes that follow fill the rest. The classes left
    at the end of an epoch, too few for P, wait for the next epoch's order.

    Args:
        classes: P.
        images: K, at least 2.
    """

    classes: int = 64
    images: int = 4

    @property
    def size(self) -> int:
        return self.classes * self.images

    def check(self, classes: Classes) -> None:
        if self.classes < 1 or self.images < 2:
            raise DistapError(
                f"sampling needs classes of at least 1 and images of at least 2, not {self.classes} and {self.images}"
            )
        usable = classes.with_pairs
        if self.classes > len(usable):
            raise DistapError(
                f"sampling.classes is {self.classes}, but only {len(usable)} classes have two images or more"
            )
        given = classes.available(usable, self.images)
        if self.size > given:
            raise DistapError(
                f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch, but with at "
                f"most {self.images} a class the data set has only {given}"
            )

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class."""
        usable = classes.with_pairs
        epoch, turn = divmod(step, len(usable) // self.classes)
        order = np.roll(epoch_order(len(usable), seed, epoch), -turn * self.classes)
        return some_of_each(classes, usable[order], self.images, self.size, seed, step)


def some_of_each(
    classes: Classes, order: NDArray[np.int64], images: int, total: int, seed: int, step: int
) -> Samples:
    """(total,) up to `images` random samples of each class, in the order given, until there are `total`."""
    given = np.cumsum(np.minimum(classes.sizes[order], images))
    needed = order[: int(np.searchsorted(given, total)) + 1]
    chosen = []
    for label in needed.tolist():
        own = classes.samples(label)
        chosen.append(own[permutation(len(own), WITHIN_CLASS, seed, step, label)[:images]])
    return np.concatenate(chosen)[:total]
