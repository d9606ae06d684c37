"""The plan of batches: which images make the global batch of a step.

A pure function of (data set, sampling, seed, step): no rank, worker or history is in it. From that follow the same
training on any number of ranks, and resuming at any step without losing or repeating an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distap.randomness import permutation

STAND_IN = 13  # first word of the key that stand-ins are drawn with; distap.data.sampling has the others

Samples = NDArray[np.int64]


class Sampling(Protocol):
    """A way to choose batches: a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        ...

    def check(self, classes: "Classes") -> None:
        """Refuse a data set that such batches cannot be taken from."""
        ...

    def steps_per_epoch(self, classes: "Classes") -> int:
        """Steps until every image, class or pair of super-categories had its turn."""
        ...

    def batch(self, classes: "Classes", seed: int, step: int) -> Samples:
        """(B,) numbers of the samples of a step, none twice."""
        ...


class Classes:
    """Samples by class, and classes by super-category.

    Args:
        labels: (N,) class of each sample, 0 .. K-1.
        groups: (K,) super-category of each class, "" where it has none; None where no class has one.
        shard_counts: number of samples in each shard, which are numbered shard by shard; None where nobody asks.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        groups: Sequence[str] | NDArray[np.str_] | None = None,
        shard_counts: NDArray[np.int64] | None = None,
    ) -> None:
        self.labels = labels
        self.shard_counts = shard_counts
        self.count = int(labels.max()) + 1
        self.sizes = np.bincount(labels, minlength=self.count)
        self.groups = np.full(self.count, "") if groups is None else np.asarray(groups)
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        """Number of samples, N."""
        return len(self.labels)

    def samples(self, label: int) -> Samples:
        """Numbers of the samples of a class, ascending."""
        end = self._ends[label]
        return self._order[end - self.sizes[label] : end]

    @cached_property
    def with_pairs(self) -> NDArray[np.int64]:
        """Classes of two samples or more: the others hold no query."""
        return np.flatnonzero(self.sizes > 1)

    @cached_property
    def by_group(self) -> list[NDArray[np.int64]]:
        """The classes of two samples or more of each super-category, super-categories by name."""
        groups = self.groups[self.with_pairs]
        return [self.with_pairs[groups == name] for name in np.unique(groups) if name]


@dataclass(frozen=True)
class Plan:
    """The batches of a training.

    Raises:
        DistapError: such batches cannot be taken from the data set.
    """

    classes: Classes
    sampling: Sampling
    seed: int

    def __post_init__(self) -> None:
        self.sampling.check(self.classes)

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.sampling.size

    def batch(self, step: int) -> Samples:
        """(B,) the sample in each slot of a step's global batch; not to be written to."""
        return _batch(self, step)

    def stand_ins(self, step: int, slot: int) -> Samples:
        """Samples to try, in order, where the one in `slot` is damaged: of its class, and not in the batch.

        Slots of one class share its remaining samples out between them, so that two ranks that replace images
        of one class in the same step never choose the same one. May be empty.
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
    """A worker that meets many damaged images of a step asks for its batch again and again."""
    batch = plan.sampling.batch(plan.classes, plan.seed, step)
    batch.flags.writeable = False
    return batch
