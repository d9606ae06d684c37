"""Batches of P classes with K images, of all classes or of two super-categories."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples, epoch_order
from distap.errors import DistapError
from distap.randomness import permutation

WITHIN_CLASS, PAIRS, GROUP = 12, 16, 17  # first words of random keys; no two uses share one


@dataclass(frozen=True)
class PByKSampling:
    """Take P classes and K images of each, as Smooth-AP and ROADMAP train, with a new order of classes each epoch.

    Classes with fewer than K images give all they have, and the classes that follow fill the rest. The classes left
    at the end of an epoch, too few for P, wait for the next epoch's order.
    """

    classes: int = 64  # P
    images: int = 4  # K, at least 2

    @property
    def size(self) -> int:
        return self.classes * self.images

    @property
    def _asked(self) -> str:
        return f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch"

    def _require_least(self, classes: int) -> None:
        if self.classes < classes or self.images < 2:
            given = f"{self.classes} and {self.images}"
            raise DistapError(f"sampling needs classes of at least {classes} and images of at least 2, not {given}")

    def check(self, data: Classes) -> None:
        self._require_least(1)
        usable = data.with_pairs
        if self.classes > len(usable):
            problem = f"only {len(usable)} classes have two images or more: set it to {len(usable)} or less"
            raise DistapError(f"sampling.classes is {self.classes}, but {problem}")
        given = data.available(usable, self.images)
        if self.size > given:
            raise DistapError(
                f"{self._asked}, but with at most {self.images} a class the data set has only {given}: take fewer"
            )

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class."""
        usable = data.with_pairs
        epoch, turn = divmod(step, len(usable) // self.classes)
        order = np.roll(epoch_order(len(usable), seed, epoch), -turn * self.classes)
        return _some_of_each(data, usable[order], self.images, self.size, seed, step)


@dataclass(frozen=True)
class SuperPByKSampling(PByKSampling):
    """Take P classes and K images of each from two super-categories, so that negatives are hard to tell apart.

    Brown et al. 2020 (Smooth-AP) and Ramzi et al. 2021 (ROADMAP) train like this on Stanford Online Products, after
    Cakir et al. 2019 (FastAP): an epoch goes through all pairs of super-categories in a random order, and each of the
    two gives half of a batch. Unlike theirs, no image is repeated if a class has fewer than K: other classes of its
    super-category fill the rest and, when these are used up, classes of the other one.

    The classes of a super-category come in a random order, a new one when too few for a batch are left of it. Pairs
    without enough images for a batch are left out, but each super-category must be in a pair that is not.
    """

    def check(self, data: Classes) -> None:
        self._require_least(2)
        without = int((data.groups[data.with_pairs] == "").sum())
        if without or len(data.by_group) < 2:
            raise DistapError(
                f"sampling by super_p_by_k needs two super-categories or more, and one for each class: the index has "
                f"{len(data.by_group)}, and {without} classes without; `distap data pack` takes them from the "
                "column `group` of a CSV file, or choose p_by_k"
            )
        names = np.unique(data.groups[data.with_pairs])
        paired = {group for pair in _pairs(self, data).tolist() for group in pair}
        for group, name in enumerate(names.tolist()):
            if group not in paired:
                given = data.available(data.by_group[group], self.images)
                raise DistapError(
                    f"{self._asked} from two super-categories, but with at most {self.images} a class {name!r} has "
                    f"only {given}, and no other one has enough to fill a batch with it"
                )

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class, one super-category after the other."""
        pairs = _pairs(self, data)
        epoch, turn = divmod(step, len(pairs))
        order = permutation(len(pairs), PAIRS, seed, epoch)
        pair = pairs[order[turn]].tolist()
        first, second = (data.available(data.by_group[group], self.images) for group in pair)
        from_first = min(first, max(self.classes // 2 * self.images, self.size - second))
        chosen = []
        for group, images in zip(pair, (from_first, self.size - from_first), strict=True):
            members = data.by_group[group]
            # How often the super-category had its turn before: it then goes on with the next `cut` of its classes.
            met = epoch * np.sum(pairs == group) + np.sum(pairs[order[:turn]] == group)
            cut = min(-(-self.classes // 2), len(members))
            again, place = divmod(int(met), len(members) // cut)
            mixed = np.roll(permutation(len(members), GROUP, seed, group, again), -place * cut)
            chosen.append(_some_of_each(data, members[mixed], self.images, images, seed, step))
        return np.concatenate(chosen)


@lru_cache(maxsize=2)
def _pairs(sampling: SuperPByKSampling, data: Classes) -> NDArray[np.int64]:
    """(pairs, 2) numbers of the super-categories that can make a batch together."""
    given = [data.available(members, sampling.images) for members in data.by_group]
    pairs = [(a, b) for a, b in combinations(range(len(given)), 2) if given[a] + given[b] >= sampling.size]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _some_of_each(data: Classes, order: NDArray[np.int64], images: int, total: int, seed: int, step: int) -> Samples:
    """(total,) up to `images` random samples of each class, in the order given, until there are `total`."""
    given = np.cumsum(np.minimum(data.sizes[order], images))
    needed = order[: int(np.searchsorted(given, total)) + 1]
    chosen = []
    for label in needed.tolist():
        own = data.samples(label)
        chosen.append(own[permutation(len(own), WITHIN_CLASS, seed, step, label)[:images]])
    return np.concatenate(chosen)[:total]
