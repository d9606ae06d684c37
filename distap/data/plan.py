"""The plan of batches: which images make the global batch of a step.

The plan is a pure function of (data set, sampling, seed, step), with `mined` also of its table of
nearest classes. It knows no rank, worker or history. So a training is the same on any number of
ranks, and resumes at any step without losing or repeating an image.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

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
        # Samples class by class, ascending in each, and where class k - 1 ends among them.
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.labels)

    def samples(self, label: int) -> Samples:
        """Return the numbers of a class's samples, ascending."""
        return self._order[self._ends[label] : self._ends[label + 1]]

    def nth(self, labels: Numbers, places: Numbers) -> Samples:
        """Return the sample at a place within a class, for arrays of classes (`labels`) and
        `places`.
        """
        return self._order[self._ends[labels] + places]

    def available(self, labels: Numbers, images: int) -> int:
        """Return how many images these classes provide if each gives at most `images`."""
        return int(np.minimum(self.sizes[labels], images).sum())

    def most(self, images: int) -> int:
        """Return the greatest P for which p_by_k with K = `images` can fill a batch."""
        number = min(len(self.with_pairs), self.available(self.with_pairs, images) // images)
        return number - self.leaves_one(number * images)

    def leaves_one(self, total: int) -> bool:
        """Return whether one of `total` images is alone in its class, since all classes have two
        images at most.
        """
        return total % 2 == 1 and int(self.sizes.max()) < 3

    @cached_property
    def by_group(self) -> dict[str, Numbers]:
        """Return classes with two or more samples by the name of their class of level 1; omit those
        without one.
        """
        of_class = np.hstack([self.levels, np.full((self.count, 1), "")])[self.with_pairs, 0]
        order = np.argsort(of_class, kind="stable")
        names, starts = np.unique(of_class[order], return_index=True)
        members = np.split(self.with_pairs[order], starts[1:])
        return {name: own for name, own in zip(names.tolist(), members, strict=False) if name}

    @cached_property
    def numbers(self) -> Numbers:
        """Return (K,), or (K, L) with coarser levels, the number of the class of each level that
        holds each class.
        """
        found = [np.arange(self.count)]
        for names in self.levels.T:
            # Without a name, what is one class on the level below is one here, alone.
            own = np.where(names == "", np.char.add("\t", found[-1].astype(np.str_)), names)
            found.append(np.unique(own, return_inverse=True)[1].reshape(-1))
        return np.stack(found, axis=1) if len(found) > 1 else found[0]


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
        """Return (B,) the sample in each slot of a step's global batch; not to be written to, since
        it is cached.
        """
        return _batch(self, step)

    def stand_ins(self, step: int, slot: int) -> Samples:
        """Return samples to try in order if the one in `slot` is damaged: of its class, not in the
        batch; maybe none.

        The slots of a class divide its remaining samples among them, so two ranks that replace
        images of one class in the same step never choose the same one.
        """
        batch = self.batch(step)
        label = int(self.classes.labels[batch[slot]])
        slots_of_class = np.flatnonzero(self.classes.labels[batch] == label)
        others = np.setdiff1d(self.classes.samples(label), batch)
        mixed = others[permutation(len(others), STAND_IN, self.seed, step, label)]
        mine: Samples = mixed[int(np.searchsorted(slots_of_class, slot)) :: len(slots_of_class)]
        return mine


@lru_cache(maxsize=4)
def _batch(plan: Plan, step: int) -> Samples:
    # Cached, because a worker that meets many damaged images of a step asks for its batch again and
    # again.
    return plan.sampling.batch(plan.classes, plan.seed, step)


def in_turn(
    counts: Numbers, starts: Numbers, takes: Numbers, longest: int, *key: int, of: Numbers
) -> Numbers:
    """Return the next `takes` elements of m sets, whose elements take turns in random orders; (sum
    of takes,).

    Each set goes through its elements 0 .. count - 1 in one random order after the other. Any
    `longest` in a row are different, also across the seam of two rounds: of those that begin a
    round, the ones that ended the round before come last, in the order in which they ended it. The
    cost is that of the elements taken, whatever came before.

    Args:
        counts: (m,) sizes of the sets. One with fewer than two times `longest` has the same order
            in every round. starts: (m,) how many elements of a set had their turn before, over all
            rounds. takes: (m,) how many have it now, at most `longest` and at most the count. key,
            of: what the orders are a function of, and a number for each set, (m,).
    """
    # A place counts the elements that a set has given since its first, so a round and a place
    # within it follow from the step alone: nothing is remembered between steps, and any step can be
    # drawn first.
    counts = np.maximum(counts, 1)  # an empty set takes none
    rounds, first = np.divmod(starts, counts)
    columns = np.arange(int(takes.max()))
    is_later, places = np.divmod(first[:, None] + columns, counts[:, None])
    values = _of_round(counts, rounds, places, longest, key, of)
    # As takes <= longest <= counts, what is taken lies in at most two rounds. Most sets stay in
    # one, so the second is drawn for those alone that cross.
    crossing = is_later.any(axis=1)
    if crossing.any():
        later = _of_round(
            counts[crossing], rounds[crossing] + 1, places[crossing], longest, key, of[crossing]
        )
        values[crossing] = np.where(is_later[crossing], later, values[crossing])
    return values[columns < takes[:, None]]


def _of_round(
    counts: Numbers,
    rounds: Numbers,
    places: Numbers,
    longest: int,
    key: tuple[int, ...],
    of: Numbers,
) -> Numbers:
    """Return (m, k) the elements at k places of one round of each of m sets."""
    # In a set this small, the elements that end a round and those that begin the next overlap
    # whatever is done. The same order in all rounds keeps `longest` in a row different.
    rounds = np.where(counts < 2 * longest, 0, rounds)
    values = shuffled(counts, places, *key, of=(of, rounds))
    # The seam: only the first `longest` places of a round depend on the one before, and only on its
    # order, not on its own seam, since with two times `longest` or more its last places are none of
    # its first. So no recursion.
    begun = (rounds > 0) & (places < longest).any(axis=1)
    if begun.any():
        counts, rounds, places, of = counts[begun], rounds[begun], places[begun], of[begun]
        first = np.tile(np.arange(longest), (len(counts), 1))
        begins = shuffled(counts, first, *key, of=(of, rounds))
        ended = shuffled(counts, first + counts[:, None] - longest, *key, of=(of, rounds - 1))
        arranged = np.take_along_axis(
            _seam(begins, ended, int(counts.max())), np.minimum(places, longest - 1), axis=1
        )
        values[begun] = np.where(places < longest, arranged, values[begun])
    return values


def _seam(begins: Numbers, ended: Numbers, count: int) -> Numbers:
    """Return (m, n) the first elements of a round, reordered: those that ended the round before
    come last.
    """
    # so that elements of two rows are never the same
    offsets = np.arange(len(begins))[:, None] * count
    # What ended the round before must not come again within `longest` places: it comes last here,
    # in the order in which it ended, so each element is at least that far from itself.
    again = np.isin(begins + offsets, ended + offsets)
    arranged = np.empty_like(begins)
    is_other = np.arange(begins.shape[1]) < (~again).sum(axis=1)[:, None]
    arranged[is_other] = begins[~again]
    arranged[~is_other] = ended[np.isin(ended + offsets, begins + offsets)]
    return arranged


def turns(count: int, size: int, turn: int, *key: int) -> Iterator[Numbers]:
    """Yield (size,) different elements of range(count) for batch `turn` and for each batch after
    it.

    The elements have their turns as `in_turn` says. Where they make less than two turns, each turn
    draws them anew.
    """
    if count < 2 * size:
        key, turn = (*key, turn), 0
    while True:
        one = np.array([count]), np.array([turn * size]), np.array([size])
        yield in_turn(*one, size, *key, of=np.zeros(1, dtype=np.int64))
        turn += 1
