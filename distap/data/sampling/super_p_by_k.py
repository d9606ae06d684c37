"""Batches of P classes with K images, all of two super-categories."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples
from distap.data.sampling.p_by_k import some_of_each
from distap.errors import DistapError
from distap.randomness import permutation

PAIRS, GROUP = 16, 17  # first words of random keys; no two uses share one


@dataclass(frozen=True)
class SuperPByKSampling:
    """Take P classes and K images of each from two super-categories, so that negatives are hard to tell apart.

    Brown et al. 2020 (Smooth-AP) and Ramzi et al. 2021 (ROADMAP) train like this on Stanford Online Products, after
    Cakir et al. 2019 (FastAP): an epoch goes through all pairs of super-categories in a random order, and each of the
    two gives half of a batch. Unlike theirs, no image is repeated if a class has fewer than K: other classes of its
    super-category fill the rest and, when these are used up, classes of the other one.

    The classes of a super-category come in a random order, a new one when too few for a batch are left of it. Pairs
    without enough images for a batch are left out, but each super-category must be in a pair that is not.

    Args:
        classes: P, of both super-categories together.
        images: K, at least 2.
    """

    classes: int = 64
    images: int = 4

    @property
    def size(self) -> int:
        return self.classes * self.images

    def check(self, classes: Classes) -> None:
        if self.classes < 2 or self.images < 2:
            raise DistapError(
                f"sampling needs classes of at least 2 and images of at least 2, not {self.classes} and {self.images}"
            )
        without = int((classes.groups[classes.with_pairs] == "").sum())
        if without or len(classes.by_group) < 2:
            raise DistapError(
                f"sampling by super_p_by_k needs two super-categories or more, and one for each class: the index has "
                f"{len(classes.by_group)}, and {without} classes without; `distap data pack` takes them from the "
                "column `group` of a CSV file, or choose p_by_k"
            )
        names = np.unique(classes.groups[classes.with_pairs])
        paired = {group for pair in _pairs(self, classes).tolist() for group in pair}
        for group, name in enumerate(names.tolist()):
            if group not in paired:
                given = classes.available(classes.by_group[group], self.images)
                raise DistapError(
                    f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch from two "
                    f"super-categories, but with at most {self.images} a class {name!r} has only {given}, and "
                    "no other one has enough to fill a batch with it"
                )

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class, one super-category after the other."""
        pairs = _pairs(self, classes)
        epoch, turn = divmod(step, len(pairs))
        order = permutation(len(pairs), PAIRS, seed, epoch)
        pair = pairs[order[turn]].tolist()
        first, second = (classes.available(classes.by_group[group], self.images) for group in pair)
        from_first = min(first, max(self.classes // 2 * self.images, self.size - second))
        chosen = []
        for group, images in zip(pair, (from_first, self.size - from_first), strict=True):
            members = classes.by_group[group]
            # How often the super-category had its turn before: it then goes on with the next `cut` of its classes.
            met = epoch * np.sum(pairs == group) + np.sum(pairs[order[:turn]] == group)
            cut = min(-(-self.classes // 2), len(members))
            again, place = divmod(int(met), len(members) // cut)
            mixed = np.roll(permutation(len(members), GROUP, seed, group, again), -place * cut)
            chosen.append(some_of_each(classes, members[mixed], self.images, images, seed, step))
        return np.concatenate(chosen)


@lru_cache(maxsize=2)
def _pairs(sampling: SuperPByKSampling, classes: Classes) -> NDArray[np.int64]:
    """(pairs, 2) numbers of the super-categories that can make a batch together."""
    given = [classes.available(members, sampling.images) for members in classes.by_group]
    pairs = [(a, b) for a, b in combinations(range(len(given)), 2) if given[a] + given[b] >= sampling.size]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
