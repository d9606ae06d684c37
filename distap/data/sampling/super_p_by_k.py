"""Batches of P classes with K images each, from two super-categories."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from distap.data.plan import Classes, Samples
from distap.data.sampling.random_images import TwoOrMore
from distap.data.sampling.some_of_each import SomeOfEach
from distap.data.turns import Turn, turns
from distap.errors import DistapError
from distap.randomness import Numbers, shuffled

# First words of random keys; no two uses share one.
PAIRS = 16
GROUP = 17


@dataclass(frozen=True)
class SuperPByKSampling(SomeOfEach):
    """Take P classes and K images of each from two super-categories, so that negatives are hard to
    tell apart.

    Brown et al. 2020 (Smooth-AP) and Ramzi et al. 2021 (ROADMAP) train like this on Stanford Online
    Products, after Cakir et al. 2019 (FastAP): an epoch goes through all pairs of super-categories
    in a random order, and each of the two gives half of a batch. Unlike theirs, no image is
    repeated if a class has fewer than K: other classes of its super-category fill the rest and,
    when these are used up, classes of the other one.

    The classes of a super-category come in a random order, a new one when too few for a batch are
    left of it. Pairs without enough images for a batch are left out, but each super-category must
    be in a pair that is not.
    """

    classes: TwoOrMore = 64
    """Number P of classes in a global batch."""

    def check(self, data: Classes) -> None:
        if self.classes < 2:  # of a set in a mixture
            raise DistapError(
                "sampling.too_small",
                "super_p_by_k takes two classes or more, but sampling.classes leaves only"
                f" {self.classes} for this data set",
            )
        self.refuse_window("`super_p_by_k` goes through each super-category at a pace of its own")
        groups, pairs = _super_categories(data, self.images, self.size)
        without = len(data.with_pairs) - sum(len(group.members) for group in groups)
        if without or len(groups) < 2:
            raise DistapError(
                "sampling.no_super_categories",
                "super_p_by_k needs two super-categories, and one for each class: the index has"
                f" {len(groups)}, and {without} classes without; `distap data pack` takes them from"
                " the column `level1` of a list, or choose p_by_k",
            )
        for number, group in enumerate(groups):
            if number not in pairs:
                raise DistapError(
                    "sampling.too_few_images",
                    f"{self.demand} of two super-categories; at most {self.images} a class,"
                    f" {group.name!r} has only {group.available}, and no other one has enough with"
                    " it",
                )
        # Of an odd number of images, two super-categories whose classes have two images at most
        # leave one alone.
        for first, second in pairs.tolist() if self.size % 2 else ():
            if not (groups[first].has_three or groups[second].has_three):
                raise DistapError(
                    "sampling.lone_image",
                    f"{self.demand}, an odd number, but no class of {groups[first].name!r} and"
                    f" {groups[second].name!r} has more than two images, so one of a batch of both"
                    " would be alone in its class: set sampling.classes or sampling.images to an"
                    " even number",
                )

    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        """Return the sample numbers of the classes whose turn it is, class by class, one
        super-category after the other.
        """
        groups, pairs = _super_categories(data, self.images, turn.longest * self.images)
        # An epoch goes through all pairs in an order of its own; this batch has the pair at place
        # `place`, and only the places up to it are drawn.
        epoch, place = divmod(turn.batch, len(pairs))
        order = shuffled(np.array([len(pairs)]), np.arange(place + 1)[None], PAIRS, seed, epoch)[0]
        before = pairs[order[:-1]]
        first, second = pairs[order[-1]].tolist()

        chosen = []
        shares = _shares(self.of_units(turn.takes), groups[first], groups[second])
        for number, share in zip((first, second), shares, strict=True):
            members = groups[number].members
            # A super-category goes on with the next `cut` of its classes.
            cut = min(-(-turn.longest // 2), len(members))
            # The batches before this one that had this super-category: an epoch has all of its
            # pairs.
            past = int(epoch * np.sum(pairs == number) + np.sum(before == number))
            places = turns(len(members), Turn(past, past * cut, cut, cut), GROUP, seed, number)
            following = (members[classes] for classes in places)
            chosen.append(self.draw(data, following, seed, turn.batch, total=share, pool=members))
        return np.concatenate(chosen)


class _SuperCategory(NamedTuple):
    name: str
    members: Numbers  # numbers of its classes with two or more images
    available: int  # images that it provides, with at most K a class
    has_three: bool  # whether a class has more than two images

    def can_give(self, share: int) -> bool:
        """Return whether it gives this many images without leaving one alone in its class."""
        return 2 <= share <= self.available and (self.has_three or share % 2 == 0)


@lru_cache(maxsize=32)
def _super_categories(
    data: Classes, images: int, size: int
) -> tuple[list[_SuperCategory], Numbers]:
    """Return the super-categories, and (pairs, 2) numbers of those that together fill a batch."""
    groups = [
        _SuperCategory(
            name,
            members,
            available=data.available(members, images),
            has_three=bool((data.sizes[members] > 2).any()),
        )
        for name, members in data.by_group.items()
    ]
    available = np.array([group.available for group in groups])
    pairs = np.stack(np.triu_indices(len(groups), 1), axis=1)
    return groups, pairs[available[pairs].sum(axis=1) >= size]


def _shares(
    sampling: SuperPByKSampling, first: _SuperCategory, second: _SuperCategory
) -> tuple[int, int]:
    """Return how many images each of two super-categories gives: half of the classes' images each.

    If one has too few, the other gives more. If a share would leave an image alone in its class,
    the shares differ by one image from that.
    """
    half = sampling.classes // 2 * sampling.images
    share = min(first.available, max(half, sampling.size - second.available))
    for images in (share, share - 1, share + 1):
        if first.can_give(images) and second.can_give(sampling.size - images):
            share = images
            break
    return share, sampling.size - share
