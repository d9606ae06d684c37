"""The plan of batches: which images make the global batch of a step.

The plan is a pure function of (data set, sampling, seed, step), with `mined` also of its table of
nearest classes. It knows no rank, worker or history. So a training is the same on any number of
ranks, and resumes at any step without losing or repeating an image.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distap.randomness import permutation, shuffled

PLAN_VERSION = 2  # of the plan; a run goes on with the version that it began with only
# of batches that classes with fewer images than wanted fill up; 3 is streamed reading
FILLED_VERSION = 4
STAND_IN = 13  # first word of random keys; no two uses share one

Numbers = NDArray[np.int64]
Samples = Numbers


class Classes:
    """Samples by class, and classes by coarser classes.

    `labels` is the (N,) class of each sample, 0 .. K-1, and `levels` the (K, L - 1) names of the
    coarser classes that hold each class, finer first; "" for none. Classes `with_pairs` can hold a
    query. `nearest` is None, or (K, m) the m classes nearest to each by descriptors of an earlier
    step, itself first.
    """

    def __init__(
        self,
        labels: Numbers,
        levels: NDArray[np.str_] | None = None,
        nearest: Numbers | None = None,
    ) -> None:
        self.labels = labels
        self.nearest = nearest
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

    def samples(self, label: int) -> Samples:
        """Return the numbers of a class's samples, ascending."""
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
        """Return (K,) class numbers; with coarser levels (K, L), the number on each level."""
        numbers = [np.arange(self.count)]
        for names in self.levels.T:
            # A class without a name on this level is one alone, as it is on the level below.
            alone = np.char.add("\t", numbers[-1].astype(np.str_))
            names = np.where(names == "", alone, names)
            numbers.append(np.unique(names, return_inverse=True)[1].reshape(-1))
        return np.stack(numbers, axis=1) if len(numbers) > 1 else numbers[0]


class Sampling(Protocol):
    """A way to choose batches: a frozen dataclass whose fields are its settings."""

    @property
    def size(self) -> int: ...  # B, images of a global batch

    def check(self, data: Classes) -> None:
        """Raise a DistapError if the data set cannot provide such batches."""

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """Return (B,) different sample numbers for a step."""


@dataclass(frozen=True, eq=False)  # cached by itself, since the fields of a sampling may be lists
class Plan:
    """The batches of a training: the sample in each slot of each step."""

    classes: Classes
    sampling: Sampling
    seed: int

    def __post_init__(self) -> None:
        self.sampling.check(self.classes)

    @property
    def version(self) -> int:
        version = getattr(self.sampling, "version", None)
        return version(self.classes) if callable(version) else PLAN_VERSION

    def batch(self, step: int) -> Samples:
        """Return (B,) the sample in each slot of a step's global batch.

        Do not write to the array: it is cached.
        """
        return _batch(self, step)

    def stand_ins(self, step: int, slot: int) -> Samples:
        """Return samples of the same class, outside the batch, to try if that in `slot` is damaged.

        The slots of a class divide its remaining samples among them, so two ranks that replace
        images of one class in the same step never choose the same one.
        """
        batch = self.batch(step)
        label = int(self.classes.labels[batch[slot]])
        slots_of_class = np.flatnonzero(self.classes.labels[batch] == label)
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


def in_turn(
    counts: Numbers,
    starts: Numbers,
    takes: Numbers,
    longest: int,
    key: tuple[int, ...],
    numbers: Numbers,
) -> Numbers:
    """Return the next `takes` elements of m sets, whose elements take turns in random orders.

    Each set goes through its elements 0 .. count - 1 in one random order after the other. Any
    `longest` in a row are different, also across the seam of two rounds: of those that begin a
    round, the ones that ended the round before come last, in the order in which they ended it. The
    cost is that of the elements taken, whatever came before.

    Args:
        counts: (m,) sizes of the sets. One with fewer than two times `longest` has the same order
            in every round.
        starts: (m,) elements of each set that had their turn before, over all rounds.
        takes: (m,) elements that have it now, at most `longest` and at most the count.
        key: words that the orders are a function of, with the number of each set.
        numbers: (m,) of the sets.
    Returns:
        (sum of takes,) elements, set after set.
    """
    # A place counts the elements that a set has given since its first, so a round and a place
    # within it follow from the step alone: nothing is remembered between steps, and any step can be
    # drawn first.
    counts = np.maximum(counts, 1)  # an empty set takes none
    rounds, first = np.divmod(starts, counts)
    columns = np.arange(int(takes.max()))
    is_later, places = np.divmod(first[:, None] + columns, counts[:, None])
    sets = _Sets(counts, numbers, longest, key)
    elements = sets.elements(rounds, places)

    # As takes <= longest <= counts, the elements taken lie in at most two rounds. Most sets stay in
    # one, so the second is drawn for those alone that cross.
    crossing = is_later.any(axis=1)
    if crossing.any():
        later = sets.only(crossing).elements(rounds[crossing] + 1, places[crossing])
        elements[crossing] = np.where(is_later[crossing], later, elements[crossing])
    return elements[columns < takes[:, None]]


@dataclass(frozen=True)
class _Sets:
    """m sets whose elements take turns, with one random order a round; see `in_turn`."""

    counts: Numbers
    numbers: Numbers
    longest: int
    key: tuple[int, ...]

    def only(self, rows: Any) -> "_Sets":
        """Return the sets in these rows, (m,) bool."""
        return replace(self, counts=self.counts[rows], numbers=self.numbers[rows])

    def elements(self, rounds: Numbers, places: Numbers) -> Numbers:
        """Return (m, k) the elements at k places of one round of each set."""
        # In a set this small, the elements that end a round and those that begin the next overlap
        # in any order. The same order in all rounds keeps `longest` in a row different.
        rounds = np.where(self.counts < 2 * self.longest, 0, rounds)
        elements = self._shuffled(rounds, places)
        # The seam: only the first `longest` places of a round depend on the one before, and only on
        # its order, not on its own seam, since with two times `longest` or more its last places are
        # none of its first. So no recursion.
        begun = (rounds > 0) & (places < self.longest).any(axis=1)
        if begun.any():
            begins = self.only(begun)._after_seam(rounds[begun])
            places = places[begun]
            arranged = np.take_along_axis(begins, np.minimum(places, self.longest - 1), axis=1)
            elements[begun] = np.where(places < self.longest, arranged, elements[begun])
        return elements

    def _shuffled(self, rounds: Numbers, places: Numbers) -> Numbers:
        return shuffled(self.counts, places, *self.key, of=(self.numbers, rounds))

    def _after_seam(self, rounds: Numbers) -> Numbers:
        """Return (m, longest) the first elements of a round, reordered.

        Elements that ended the round before must not come again within `longest` places, so they
        come last here, in the order in which they ended it. With `longest` 4, and of 9 elements:

            end of a round     5 2 7 1 |
            begins, shuffled           | 7 3 1 8
            begins, reordered          | 3 8 7 1    7 and 1 are four places from themselves
        """
        first = np.tile(np.arange(self.longest), (len(rounds), 1))
        begins = self._shuffled(rounds, first)
        ended = self._shuffled(rounds - 1, first + self.counts[:, None] - self.longest)
        # so that elements of two rows are never the same
        offsets = np.arange(len(rounds))[:, None] * int(self.counts.max())
        again = np.isin(begins + offsets, ended + offsets)
        arranged = np.empty_like(begins)
        is_new = np.arange(self.longest) < (~again).sum(axis=1)[:, None]
        arranged[is_new] = begins[~again]
        arranged[~is_new] = ended[np.isin(ended + offsets, begins + offsets)]
        return arranged


def turns(count: int, size: int, turn: int, *key: int) -> Iterator[Numbers]:
    """Yield (size,) different elements of range(count) for batch `turn` and each batch after it.

    The elements take turns as in `in_turn`. If they make less than two turns, each batch draws
    them anew.
    """
    if count < 2 * size:
        key = (*key, turn)
        turn = 0
    while True:
        yield in_turn(
            counts=np.array([count]),
            starts=np.array([turn * size]),
            takes=np.array([size]),
            longest=size,
            key=key,
            numbers=np.zeros(1, dtype=np.int64),
        )
        turn += 1
