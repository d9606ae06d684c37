"""The plan of batches: which images make the global batch of a step.

The plan is a pure function of (data set, sampling, seed, step), with `mined` also of its table of
nearest classes. It knows no rank, worker or history. So a training is the same on any number of
ranks, and resumes at any step without losing or repeating an image.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distap.randomness import Numbers, permutation

# Of the plan, and of what a step makes of it; a run goes on with the version that it began with
# only. Streamed reading has another.
PLAN_VERSION = 5
STAND_IN = 13  # first word of random keys; no two uses share one
ORDERS_KEPT = 64  # steps that may lie between the first read ahead and the one that is trained

Samples = Numbers


class LabelledSamples(ABC):
    """N samples with their classes and shards: what a plan knows of one data set, or of several."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def numbers(self) -> Numbers:
        """Return (K,) class numbers; with coarser levels (K, L), the number on each level."""

    @property
    @abstractmethod
    def spread(self) -> NDArray[np.float64]:
        """Return (S,) where in the data set the middle of each shard lies, from 0 to 1."""

    @property
    @abstractmethod
    def parts(self) -> list[tuple[int, "Classes"]]:
        """Return the classes of each set, with the number of its first shard."""

    @abstractmethod
    def labels_of(self, samples: Samples) -> Numbers:
        """Return the classes of some samples."""

    @abstractmethod
    def shards_of(self, samples: Samples) -> Numbers:
        """Return the shards that some samples lie in: 0 for all, if there are no shards."""

    @abstractmethod
    def samples(self, label: int) -> Samples:
        """Return the numbers of a class's samples, ascending."""


class Classes(LabelledSamples):
    """Samples by class, and classes by coarser classes.

    `labels` is the (N,) class of each sample, 0 .. K-1, and `levels` the (K, L - 1) names of the
    coarser classes that hold each class, finer first; "" for none. Classes `with_pairs` can hold a
    query. `nearest` is None, or (K, m) the m classes nearest to each by descriptors of an earlier
    step, itself first. `shards` are None, or the (N,) shard of each sample.
    """

    def __init__(
        self,
        labels: Numbers,
        levels: NDArray[np.str_] | None = None,
        nearest: Numbers | None = None,
        shards: NDArray[np.int32] | None = None,
    ) -> None:
        self.labels = labels
        self.nearest = nearest
        self.shards = shards
        self.sizes = np.bincount(labels)  # (K,) number of samples of each class
        self.count = len(self.sizes)
        self.levels = np.full((self.count, 0), "") if levels is None else levels
        self.with_pairs = np.flatnonzero(self.sizes > 1)
        # Samples class by class, ascending in each, and where class k - 1 ends among them. For the
        # labels 1 0 1 0 0, the order is 1 3 4 | 0 2, and the ends are 0 3 5.
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def parts(self) -> list[tuple[int, "Classes"]]:
        return [(0, self)]

    def labels_of(self, samples: Samples) -> Numbers:
        return self.labels[samples]

    def shards_of(self, samples: Samples) -> Numbers:
        if self.shards is None:
            return np.zeros_like(samples)
        return self.shards[samples].astype(np.int64)

    def samples(self, label: int) -> Samples:
        return self._order[self._ends[label] : self._ends[label + 1]]

    def nth(self, labels: Numbers, places: Numbers) -> Samples:
        """Return the samples at these places within their classes, for arrays that broadcast."""
        return self._order[self._ends[labels] + places]

    def available(self, labels: Numbers, images: int) -> int:
        """Return how many images these classes provide if each gives at most `images`."""
        return int(np.minimum(self.sizes[labels], images).sum())

    def most(self, images: int) -> int:
        """Return the greatest P for which p_by_k with K = `images` can fill a batch."""
        number = min(len(self.with_pairs), self.available(self.with_pairs, images) // images)
        return number - self.leaves_one(number * images)

    def leaves_one(self, total: int) -> bool:
        """Return whether one of `total` images is alone in its class.

        That is so for odd numbers if all classes have two images at most.
        """
        return total % 2 == 1 and int(self.sizes.max()) < 3

    @cached_property
    def spread(self) -> NDArray[np.float64]:
        if self.shards is None:
            return np.zeros(1)
        counts = np.bincount(self.shards)
        return (np.cumsum(counts) - counts / 2) / len(self)

    @cached_property
    def scattered(self) -> float:
        """Return the share of samples that lie in other shards than the first of their class."""
        if self.shards is None:
            return 0.0
        return float(np.mean(self.home_shards(self.labels) != self.shards))

    def home_shards(self, labels: Numbers) -> Numbers:
        """Return the shard in which the first sample of each class lies."""
        assert self.shards is not None
        return self.shards[self.nth(labels, np.zeros_like(labels))].astype(np.int64)

    @cached_property
    def by_group(self) -> dict[str, Numbers]:
        """Return the classes with two or more samples by the name of their class of level 1.

        Classes without such a name are left out.
        """
        groups = defaultdict[str, list[int]](list)
        if self.levels.shape[1]:
            for label in self.with_pairs.tolist():
                groups[str(self.levels[label, 0])].append(label)
        return {name: np.array(groups[name]) for name in sorted(groups) if name}

    @cached_property
    def numbers(self) -> Numbers:
        numbers = [np.arange(self.count)]
        for names in self.levels.T:
            # A class without a name on this level is one alone, as it is on the level below.
            alone = np.char.add("\t", numbers[-1].astype(np.str_))
            names = np.where(names == "", alone, names)
            numbers.append(np.unique(names, return_inverse=True)[1].reshape(-1))
        return np.stack(numbers, axis=1) if len(numbers) > 1 else numbers[0]


class MixedClasses(LabelledSamples):
    """The samples, classes and shards of several sets, numbered on from set to set.

    If there are two sets or more, the set is the coarsest level, above the levels that the sets
    have themselves. The tables of the sets are not copied.
    """

    def __init__(self, sets: Sequence[Classes]) -> None:
        self.sets = tuple(sets)
        # Where the samples, classes and shards of each set begin, and where the last one's end.
        self.first = _starts([len(classes) for classes in sets])
        self.first_class = _starts([classes.count for classes in sets])
        self.first_shard = _starts([len(classes.spread) for classes in sets])

    def __len__(self) -> int:
        return int(self.first[-1])

    def sets_of(self, samples: Samples) -> Numbers:
        """Return the number of the set that each of some samples is in."""
        return np.searchsorted(self.first, samples, side="right") - 1

    @cached_property
    def numbers(self) -> Numbers:
        tables = [classes.numbers.reshape(classes.count, -1) for classes in self.sets]
        depth = max(table.shape[1] for table in tables)
        # Where a set has fewer levels, each class is one alone on the further ones.
        tables = [np.pad(table, ((0, 0), (0, depth - table.shape[1])), "edge") for table in tables]
        below = np.zeros(depth, dtype=np.int64)  # numbers of the sets before, by level
        joined = list[Numbers]()
        for number, table in enumerate(tables):
            of_set = np.full((len(table), int(len(tables) > 1)), number)
            joined.append(np.concatenate([table + below, of_set], axis=1))
            below = below + table.max(axis=0) + 1
        numbers = np.concatenate(joined)
        return numbers if numbers.shape[1] > 1 else numbers[:, 0]

    @cached_property
    def spread(self) -> NDArray[np.float64]:
        return np.concatenate([classes.spread for classes in self.sets])

    @property
    def parts(self) -> list[tuple[int, Classes]]:
        return list(zip(self.first_shard.tolist(), self.sets, strict=False))

    def labels_of(self, samples: Samples) -> Numbers:
        return self._looked_up(samples, self.first_class, Classes.labels_of)

    def shards_of(self, samples: Samples) -> Numbers:
        return self._looked_up(samples, self.first_shard, Classes.shards_of)

    def samples(self, label: int) -> Samples:
        number = int(np.searchsorted(self.first_class, label, side="right")) - 1
        of_set = self.sets[number].samples(label - int(self.first_class[number]))
        return of_set + self.first[number]

    def _looked_up(
        self, samples: Samples, first: Numbers, look_up: Callable[[Classes, Samples], Numbers]
    ) -> Numbers:
        """Look samples up in their sets; return what was found, numbered on from set to set."""
        of_sets = self.sets_of(samples)
        numbers_on = np.empty_like(samples)
        for number in np.unique(of_sets).tolist():
            is_in_set = of_sets == number
            local = samples[is_in_set] - self.first[number]
            numbers_on[is_in_set] = look_up(self.sets[number], local) + first[number]
        return numbers_on


def _starts(counts: Sequence[int]) -> Numbers:
    return np.concatenate([[0], np.cumsum(counts)])


class Sampling(Protocol):
    """A way to choose batches: a frozen dataclass whose fields are its settings."""

    @property
    def size(self) -> int: ...  # B, images of a global batch

    def check(self, data: Any) -> None:
        """Raise a DistapError if the data set, its `Classes`, cannot provide such batches."""

    def batch(self, data: Any, seed: int, step: int) -> Samples:
        """Return (B,) different sample numbers for a step, given the `Classes` of the data set."""


@dataclass(frozen=True, eq=False)  # cached by itself, since the fields of a sampling may be lists
class Plan:
    """The batches of a training: the sample in each slot of each step."""

    classes: LabelledSamples
    sampling: Sampling
    seed: int

    def __post_init__(self) -> None:
        self.sampling.check(self.classes)

    def batch(self, step: int) -> Samples:
        """Return (B,) the sample in each slot of a step's global batch.

        Do not write to the array: it is cached.
        """
        return _batch(self, step)

    def spread(self, step: int) -> NDArray[np.float64]:
        """Return (S,) where each shard lies, from 0 to 1, among those that a step draws from.

        The ranks take the images of a step in this order, so 0.25 to 0.5 is the second rank of
        four. With windows, all shards of a window are spread from 0 to 1.
        """
        spread = getattr(self.sampling, "spread", None)
        return self.classes.spread if spread is None else spread(self.classes, self.seed, step)

    def order(self, step: int, ranks: int) -> Numbers | None:
        """Return (B,) the slot at each place r + W i, the slots of rank r ascending; None for one.

        Each rank takes a run of the images in order of their place in the shards, so that a host
        reads few shards and neighbours are one request. The batch, and what is drawn for each of
        its slots, do not change.
        """
        return None if ranks == 1 else _order(self, step, ranks)

    def stand_ins(self, step: int, slot: int) -> Samples:
        """Return samples of the same class, outside the batch, to try if that in `slot` is damaged.

        The slots of a class divide its remaining samples among them, so two ranks that replace
        images of one class in the same step never choose the same one.
        """
        batch = self.batch(step)
        labels = self.classes.labels_of(batch)
        label = int(labels[slot])
        slots_of_class = np.flatnonzero(labels == label)
        remaining = np.setdiff1d(self.classes.samples(label), batch)
        # The i-th of the n slots of this class takes the elements i, i + n, i + 2 n and so on.
        mixed = remaining[permutation(len(remaining), STAND_IN, self.seed, step, label)]
        share: Samples = mixed[int(np.searchsorted(slots_of_class, slot)) :: len(slots_of_class)]
        return share


@lru_cache(maxsize=4)
def _batch(plan: Plan, step: int) -> Samples:
    # Cached, because a worker that meets many damaged images of a step needs its batch again and
    # again.
    return plan.sampling.batch(plan.classes, plan.seed, step)


@lru_cache(maxsize=ORDERS_KEPT)
def _order(plan: Plan, step: int, ranks: int) -> Numbers:
    batch = plan.batch(step)
    by_place = np.lexsort((batch, plan.spread(step)[plan.classes.shards_of(batch)]))
    sizes = [len(range(rank, len(batch), ranks)) for rank in range(ranks)]
    order = np.empty_like(by_place)
    for rank, slots in enumerate(np.split(by_place, np.cumsum(sizes)[:-1])):
        order[rank::ranks] = np.sort(slots)
    return order
