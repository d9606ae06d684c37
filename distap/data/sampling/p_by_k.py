"""Batches of P classes with K images."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distap.data.plan import Classes, Samples
from distap.data.sampling.classes_by_images import ClassesByImages
from distap.data.sampling.draws import available, epoch_order, some_of_each
from distap.errors import DistapError


@dataclass(frozen=True)
class PByKSampling(ClassesByImages):
    """P classes, K images of each, as Smooth-AP and ROADMAP train; a new order of classes each epoch.

    Classes with fewer than K images give all they have, and the rest is filled from the classes that follow. The
    classes that are left at an epoch's end and make no P of their own wait for the next, whose order is drawn anew.

    Args:
        classes: P.
        images: K, at least 2.
    """

    name: Literal["p_by_k"] = "p_by_k"

    def check(self, classes: Classes) -> None:
        """Refuse settings that the data set cannot fill."""
        if self.classes < 1 or self.images < 2:
            raise DistapError(
                f"sampling needs classes of at least 1 and images of at least 2, not {self.classes} and {self.images}"
            )
        usable = classes.with_pairs
        if self.classes > len(usable):
            raise DistapError(
                f"sampling.classes is {self.classes}, but only {len(usable)} classes have two images or more"
            )
        given = available(classes, usable, self.images)
        if self.size > given:
            raise DistapError(
                f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch, but with at "
                f"most {self.images} a class the data set has only {given}"
            )

    def steps_per_epoch(self, classes: Classes) -> int:
        """Steps until each class had its turn, but for the few that fill no step."""
        return len(classes.with_pairs) // self.classes

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class."""
        epoch, turn = divmod(step, self.steps_per_epoch(classes))
        order = np.roll(epoch_order(len(classes.with_pairs), seed, epoch), -turn * self.classes)
        return some_of_each(classes, classes.with_pairs[order], self.images, self.size, seed, step)
