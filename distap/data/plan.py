"""The plan of batches: which images make the global batch of a step.

The plan is a pure function of (data set, sampling, seed, step), and knows no rank, worker or history. So a training
is the same on any number of ranks, and resumes at any step without losing or repeating an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distap.randomness import permutation

EPOCH, STAND_IN = 11, 13  # first words of random keys; no two uses share one

Samples = NDArray[np.int64]


class Classes:
    """Samples by class, and classes by super-category.

    `labels` is the (N,) class of each sample, 0 .. K-1, and `groups` the (K,) super-category of each class or "".
    """

    def __init__(self, labels: NDArray[np.int64], groups: Sequence[str] | NDArray[np.str_] | None = None) -> None:
        self.labels = labels
        self.count = int(labels.max()) + 1
        self.sizes = np.bincount(labels, minlength=self.count)
        self.groups = np.full(self.count, "") if groups is None else np.asarray(groups)
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return len(self.labels)

    def samples(self, label: int) -> Samples:
        """Numbers of the samples of a class, ascending."""
        end = self._ends[label]
        return self._order[end - self.sizes[label] : end]

    def available(self, labels: NDArray[np.int64], images: int) -> int:
        """Number of images that these classes can give if none gives more than `images`."""
        return int(np.minimum(self.sizes[labels], images).sum())

    @cached_property
    def with_pairs(self) -> NDArray[np.int64]:
        """Classes of two samples or more: the others hold no query."""
        return np.flatnonzero(self.sizes > 1)

    @cached_property
    def by_group(self) -> list[NDArray[np.int64]]:
        """The classes of two samples or more of each super-category, super-categories by name."""
        groups = self.groups[self.with_pairs]
        return [self.with_pairs[groups == name] for name in np.unique(groups) if name]


class Sampling(Protocol):
    """A way to choose batches: a frozen dataclass whose fields are its settings."""

    @property
    def size(self) -> int: ...  # B, images of a global batch

    def check(self, data: Classes) -> None:
        """Raise a DistapError if such batches cannot be taken from the data set."""

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        """(B,) numbers of the samples of a step, none twice."""


@dataclass(frozen=True)
class Plan:
    """The batches of a training."""

    classes: Classes
    sampling: Sampling
    seed: int

    def __post_init__(self) -> None:
        self.sampling.check(self.classes)

    def batch(self, step: int) -> Samples:
        """(B,) the sample in each slot of a step's global batch, as a read-only array."""
        return _batch(self, step)

    def stand_ins(self, step: int, slot: int) -> Samples:
        """Samples to try, in order, if the one in `slot` is damaged: of its class, and not in the batch; may be none.

        The slots of a class divide its remaining samples among them, so two ranks that replace images of one class
        in the same step never choose the same one.
        """
        batch = self.batch(step)
        label = int(self.classes.labels[batch[slot]])
        slots_of_class = np.flatnonzero(self.classes.labels[batch] == label)
        others = np.setdiff1d(self.classes.samples(label), batch)
        shuffled = others[permutation(len(others), STAND_IN, self.seed, step, label)]
        mine: Samples = shuffled[int(np.searchsorted(slots_of_class, slot)) :: len(slots_of_class)]
        return mine


@lru_cache(maxsize=4)
def _batch(plan: Plan, step: int) -> Samples:
    # Cached, because a worker that meets many damaged images of a step asks for its batch again and again.
    batch = plan.sampling.batch(plan.classes, plan.seed, step)
    batch.flags.writeable = False
    return batch


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A random order of range(count), a new one each epoch, as a read-only array."""
    order = permutation(count, EPOCH, seed, epoch)
    order.flags.writeable = False
    return order
