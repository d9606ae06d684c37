"""Ways to choose the images of a global batch: at random, of every class, or of P classes with K
images each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from distap.data.plan import FILLED_VERSION, PLAN_VERSION, Classes, Numbers, Samples, in_turn, turns
from distap.errors import DistapError
from distap.randomness import permutation, shuffled

# First words of random keys; no two uses share one.
IMAGE_ORDER = 11
TURN = 14
EXTRA_TURN = 15
CLASSES = 18
WITHIN_CLASS = 12
PAIRS = 16
GROUP = 17
MIXED = 19
COMPANY = 20


@dataclass(frozen=True)
class RandomSampling:
    """Cut random orders of all images, one after the other, into batches.

    Each image comes once in an epoch, and none twice in a batch: where a batch holds the end of an
    epoch and the beginning of the next, images of the end come a little later in the next. A data
    set of less than two batches has no epochs; each batch is drawn anew.
    """

    batch_size: Annotated[int, Field(ge=2)] = 4096
    """Number B of images in a global batch."""

    @property
    def size(self) -> int:
        return self.batch_size

    def check(self, data: Classes) -> None:
        if self.batch_size > len(data):
            only = f"the data set has only {len(data)} images and no image may be in a batch twice"
            raise DistapError(
                f"sampling.batch_size is {self.batch_size}, but {only}: set it to {len(data)} or"
                " less"
            )

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        return next(turns(len(data), self.batch_size, step, IMAGE_ORDER, seed))


@dataclass(frozen=True)
class ClassesSampling(RandomSampling):
    """Take every class in every batch, as Revaud et al. 2019 train on Landmarks.

    The K classes share the B images as evenly as possible: a class gives its share, or all it has,
    and the larger classes make up for the rest. If that leaves shares of L and of L + 1, the larger
    share goes round. All images of a class are used, in a random order, before any of them is used
    again. B is at least twice the number of classes.
    """

    def check(self, data: Classes) -> None:
        if self.batch_size < 2 * data.count:
            wanted = (
                f"two of each of {data.count} classes: set it to {2 * data.count} or more, or"
                " choose p_by_k"
            )
            raise DistapError(
                f"sampling.batch_size is {self.batch_size}, but `classes` takes {wanted}"
            )
        super().check(data)

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        level, larger = _shares(data, self.batch_size)
        takes = np.minimum(data.sizes, level)
        starts = step * takes
        extra = self.batch_size - int(takes.sum())
        if extra:
            # Deal the extra images out like cards, in one fixed order of the larger classes. So the
            # number of images that a class has given before this step follows from the step alone.
            order = larger[permutation(len(larger), EXTRA_TURN, seed)]
            # Before this step, step * extra images were dealt: the class at place j of `order` got
            # one of each full round, and one more if j comes before the place where the next is
            # dealt. That is ceil((dealt - j) / n).
            starts[order] -= (np.arange(len(larger)) - step * extra) // len(larger)
            takes[order[(step * extra + np.arange(extra)) % len(larger)]] += 1
        labels = np.arange(data.count)
        drawn = in_turn(data.sizes, starts, takes, level + bool(extra), TURN, seed, of=labels)
        return data.nth(np.repeat(labels, takes), drawn)


@lru_cache(maxsize=2)
def _shares(data: Classes, total: int) -> tuple[int, NDArray[np.int64]]:
    """Return how many images each class gives of `total` (or all its images), and which classes
    have more.
    """
    sizes = np.sort(data.sizes)
    # If the k smallest classes give all they have, levels[k] is what each of the others would have
    # to give. The first k whose next class is larger than that is the answer.
    given_before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    levels = (total - given_before) // (len(sizes) - np.arange(len(sizes)))
    stuck = np.flatnonzero(levels < sizes)
    level = int(levels[stuck[0]]) if len(stuck) else int(sizes[-1])
    return level, np.flatnonzero(data.sizes > level)


@dataclass(frozen=True)
class SomeOfEach:
    """Take P classes and K images of each."""

    classes: PositiveInt = 64
    """Number P of classes in a global batch."""
    images: Annotated[int, Field(ge=2)] = 4
    """Number K of images of each class."""

    @property
    def size(self) -> int:
        return self.classes * self.images

    def version(self, data: Classes) -> int:
        """Return the version of the plan, which changed where a class is cut to fill a batch up."""
        return FILLED_VERSION if (data.sizes[data.with_pairs] < self.images).any() else PLAN_VERSION

    def _refuse_lone(self, data: Classes) -> None:
        if data.leaves_one(self.size):
            raise DistapError(
                f"{self._asked}, an odd number, but no class has more than two images, so one of"
                " each batch would be alone in its class: set sampling.classes or sampling.images"
                " to an even number"
            )

    @property
    def _asked(self) -> str:
        return f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch"


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
        usable = data.with_pairs
        levels = data.levels.shape[1]
        if self.balance is not None and not 1 <= self.balance <= levels:
            raise DistapError(
                f"sampling.balance is {self.balance}; the index has {levels} levels of coarser"
                " classes"
            )
        if self.classes > len(usable):
            problem = (
                f"only {len(usable)} classes have two images or more: set it to {len(usable)} or"
                " less"
            )
            raise DistapError(f"sampling.classes is {self.classes}, but {problem}")
        if self.size > 2 * len(usable) and self.size > (
            given := data.available(usable, self.images)
        ):
            raise DistapError(
                f"{self._asked}, but with at most {self.images} a class the data set has only"
                f" {given}: take fewer"
            )
        self._refuse_lone(data)

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """Return (B,) sample numbers, class by class."""
        usable = data.with_pairs
        if self.balance is None:
            places = turns(len(usable), self.classes, step, CLASSES, seed)
        else:
            # The classes of this level share out the P classes as classes share out the images of a
            # batch.
            level = _of_level(data, self.balance)
            evenly = ClassesSampling(self.classes)
            places = (
                evenly.batch(level, seed, turn)[permutation(self.classes, MIXED, seed, turn)]
                for turn in count(step)
            )
        order = (usable[chosen] for chosen in places)
        return _some_of_each(data, order, data.with_pairs, self.images, self.size, seed, step)


@dataclass(frozen=True)
class MinedSampling(SomeOfEach):
    """Take P classes in groups that lie near each other, so that negatives are hard, and K images
    of each.

    Classes take turns as in `p_by_k`, and each brings those whose mean descriptors are nearest to
    its own. As Gordo et al. 2017 and Radenović et al. 2019 mine negatives from a pool that is
    described again from time to time, the training describes all its images before the first step
    and after every `every` steps.
    """

    near: Annotated[int, Field(ge=2)] = 8
    """Number of classes of a group."""
    every: PositiveInt = 100
    """Number of steps after which the training describes its images again."""

    def check(self, data: Classes) -> None:
        PByKSampling(self.classes, self.images).check(data)

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """Return (B,) sample numbers, class by class; those of p_by_k before any images are
        described.
        """
        nearest = np.arange(data.count)[:, None] if data.nearest is None else data.nearest
        places = turns(
            len(data.with_pairs), -(-self.classes // nearest.shape[1]), step, CLASSES, seed
        )
        order = (nearest[data.with_pairs[chosen]].reshape(-1) for chosen in places)
        return _some_of_each(data, order, data.with_pairs, self.images, self.size, seed, step)


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

    classes: Annotated[int, Field(ge=2)] = 64
    """Number P of classes in a global batch."""

    def check(self, data: Classes) -> None:
        without = len(data.with_pairs) - sum(map(len, data.by_group.values()))
        if without or len(data.by_group) < 2:
            found = f"the index has {len(data.by_group)}, and {without} classes without"
            remedy = (
                "`distap data pack` takes them from the column `level1` of a list, or choose p_by_k"
            )
            raise DistapError(
                f"super_p_by_k needs two super-categories, and one for each class: {found};"
                f" {remedy}"
            )
        pairs = _pairs(self.images, self.size, data)
        paired = set(np.unique(pairs).tolist())
        for group, name in enumerate(data.by_group):
            if group not in paired:
                given = (
                    f"{name!r} has only {_available(self.images, data)[group]}, and no other one"
                    " has enough with it"
                )
                raise DistapError(
                    f"{self._asked} of two super-categories; at most {self.images} a class, {given}"
                )
        # Two super-categories whose classes have two images at most give no odd number without one
        # that is alone.
        names = list(data.by_group)
        gives_pairs = np.array(
            [data.sizes[members].max() < 3 for members in data.by_group.values()]
        )
        lone = pairs[gives_pairs[pairs].all(axis=1)]
        if self.size % 2 and len(lone):
            first, second = lone[0].tolist()
            raise DistapError(
                f"{self._asked}, an odd number, but no class of {names[first]!r} and"
                f" {names[second]!r} has more than two images, so one of a batch of both would be"
                " alone in its class: set sampling.classes or sampling.images to an even number"
            )

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """Return (B,) sample numbers, class by class, one super-category after the other."""
        pairs = _pairs(self.images, self.size, data)
        epoch, turn = divmod(step, len(pairs))
        order = shuffled(np.array([len(pairs)]), np.arange(turn + 1)[None], PAIRS, seed, epoch)[0]
        before = pairs[order[:-1]]
        pair = pairs[order[-1]].tolist()
        available = _available(self.images, data)
        from_first = min(
            available[pair[0]], max(self.classes // 2 * self.images, self.size - available[pair[1]])
        )
        classes = list(data.by_group.values())
        chosen = []
        most = [available[group] for group in pair]
        threes = [bool((data.sizes[classes[group]] > 2).any()) for group in pair]
        for group, images in zip(
            pair, _shares_of_pair(from_first, self.size, most, threes), strict=True
        ):
            members = classes[group]
            # A super-category goes on with the next `cut` of its classes.
            cut = min(-(-self.classes // 2), len(members))
            # `met` counts the batches before this one that had this super-category: an epoch has
            # all of its pairs.
            met = int(epoch * np.sum(pairs == group) + np.sum(before == group))
            following = (
                members[places] for places in turns(len(members), cut, met, GROUP, seed, group)
            )
            chosen.append(_some_of_each(data, following, members, self.images, images, seed, step))
        return np.concatenate(chosen)


@lru_cache(maxsize=2)
def _of_level(data: Classes, level: int) -> Classes:
    """Return the classes with two or more samples as samples of their classes of a coarser
    level."""
    return Classes(
        np.unique(data.numbers[data.with_pairs, level], return_inverse=True)[1].reshape(-1)
    )


@lru_cache(maxsize=2)
def _available(images: int, data: Classes) -> list[int]:
    """Return how many images each super-category provides."""
    return [data.available(members, images) for members in data.by_group.values()]


@lru_cache(maxsize=2)
def _pairs(images: int, size: int, data: Classes) -> NDArray[np.int64]:
    """Return (pairs, 2) numbers of super-categories that together fill a batch."""
    given = np.array(_available(images, data))
    pairs = np.stack(np.triu_indices(len(given), 1), axis=1)
    return pairs[given[pairs].sum(axis=1) >= size]


def _shares_of_pair(
    from_first: int, total: int, most: Sequence[int], threes: Sequence[bool]
) -> tuple[int, int]:
    """Return how many images each of two super-categories gives: `from_first` of the first, or one
    less or more.

    An odd number leaves an image alone in its class, unless some class of the super-category can
    give three.

    Args:
        most: images that each super-category can give.
        threes: whether it has such a class.
    """
    for first in (from_first, from_first - 1, from_first + 1):
        shares = first, total - first
        if all(
            2 <= share <= own and (has or share % 2 == 0)
            for share, own, has in zip(shares, most, threes, strict=True)
        ):
            return shares
    return from_first, total - from_first


def _some_of_each(
    data: Classes,
    order: Iterator[Numbers],
    pool: Numbers,
    images: int,
    total: int,
    seed: int,
    step: int,
) -> Samples:
    """Return (total,) up to `images` random samples per class of `pool`, in the order of turns.

    The class that fills the batch up gives two samples at least; see `_with_company`.
    """
    needed = np.empty(0, dtype=np.int64)
    while data.available(needed, images) < total:
        longer = np.concatenate([needed, next(order)])
        # each class once, in this order
        needed = longer[np.sort(np.unique(longer, return_index=True)[1])]
    most = np.minimum(data.sizes[needed], images)
    takes = np.minimum(most, total - (np.cumsum(most) - most))
    needed, takes = needed[takes > 0], takes[takes > 0]
    if takes[-1] == 1:
        unused = np.setdiff1d(pool[np.minimum(data.sizes[pool], images) > 2], needed)
        unused = unused[permutation(len(unused), COMPANY, seed, step)]
        needed, takes = _with_company(needed, takes, int(most[len(needed) - 1]), unused)
    sizes = data.sizes[needed]
    # A class of fewer than K images repeats its last place up to K, which the mask in the last line
    # drops.
    places = np.minimum(np.arange(images), sizes[:, None] - 1)
    drawn = shuffled(sizes, places, WITHIN_CLASS, seed, step, of=(needed,))
    return data.nth(needed[:, None], drawn)[np.arange(images) < takes[:, None]]


def _with_company(
    needed: Numbers, takes: Numbers, most: int, unused: Numbers
) -> tuple[Numbers, Numbers]:
    """Return classes and their numbers of images so that the last one, whose image would be alone,
    has two or more.

    Args:
        most: images that the last class can give.
        unused: other classes that can give three.
    """
    generous = np.flatnonzero(takes[:-1] > 2)
    if len(generous):
        company = np.zeros_like(takes)
        company[generous[-1]] = -1
        company[-1] = 1
        return needed, takes + company
    # All others give two, so the batch is odd: one class with three takes the place of two.
    third = needed[-1:] if most > 2 else unused[:1]
    if not len(third):
        return needed, takes
    return np.append(needed[:-2], third), np.append(takes[:-2], 3)
