"""The plan of batches: which images make the global batch of a step.

A pure function of (labels, sampling, seed, step): no rank, worker or history is in it. From that follow the same
training on any number of ranks, and resuming at any step without losing or repeating an image.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.randomness import permutation

# First words of the keys that the plan draws with.
EPOCH, WITHIN_CLASS, STAND_IN = 11, 12, 13

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
        """Steps until every image, or class, had its turn."""
        ...

    def batch(self, classes: "Classes", seed: int, step: int) -> Samples:
        """(B,) numbers of the samples of a step, none twice."""
        ...


class Classes:
    """Samples by class.

    Args:
        labels: (N,) class of each sample, 0 .. K-1.
    """

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self.labels = labels
        self.count = int(labels.max()) + 1
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.cumsum(np.bincount(labels, minlength=self.count))

    def __len__(self) -> int:
        """Number of samples, N."""
        return len(self.labels)

    def samples(self, label: int) -> Samples:
        """Numbers of the samples of a class, ascending."""
        start = self._ends[label - 1] if label else 0
        return self._order[start : self._ends[label]]

    @cached_property
    def with_pairs(self) -> NDArray[np.int64]:
        """Classes of two samples or more: the others hold no query."""
        return np.flatnonzero(np.bincount(self.labels, minlength=self.count) > 1)


@dataclass(frozen=True)
class RandomSampling:
    """A new order of all images each epoch, cut into batches; the rest that fills no batch waits for the next.

    Args:
        batch_size: B, images of a global batch.
    """

    name: Literal["random"] = "random"
    batch_size: int = 4096

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.batch_size

    def check(self, classes: Classes) -> None:
        """Refuse a batch larger than the data set."""
        if self.batch_size < 2:
            raise DistapError(f"sampling.batch_size is {self.batch_size}; ranking needs at least 2 images")
        if self.batch_size > len(classes):
            raise DistapError(
                f"sampling.batch_size is {self.batch_size}, but the data set has only {len(classes)} images and no "
                "image may be in a batch twice"
            )

    def steps_per_epoch(self, classes: Classes) -> int:
        """Whole batches in the data set."""
        return len(classes) // self.batch_size

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers."""
        epoch, turn = divmod(step, self.steps_per_epoch(classes))
        order = _epoch_order(len(classes), seed, epoch)
        return order[turn * self.batch_size : (turn + 1) * self.batch_size]


@dataclass(frozen=True)
class PByKSampling:
    """P classes, K images of each, as Smooth-AP and ROADMAP train; a new order of classes each epoch.

    Classes with fewer than K images give all they have, and the rest is filled from the classes that follow.

    Args:
        classes: P.
        images: K, at least 2.
    """

    name: Literal["p_by_k"] = "p_by_k"
    classes: int = 64
    images: int = 4

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.classes * self.images

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
        available = sum(min(self.images, len(classes.samples(label))) for label in usable)
        if self.size > available:
            raise DistapError(
                f"sampling takes {self.classes} classes x {self.images} images = {self.size} a batch, but with at "
                f"most {self.images} a class the data set has only {available}"
            )

    def steps_per_epoch(self, classes: Classes) -> int:
        """Steps until each class had its turn, but for the few that fill no step."""
        return len(classes.with_pairs) // self.classes

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class."""
        epoch, turn = divmod(step, self.steps_per_epoch(classes))
        order = np.roll(_epoch_order(len(classes.with_pairs), seed, epoch), -turn * self.classes)
        chosen: list[Samples] = []
        missing = self.size
        for label in classes.with_pairs[order].tolist():
            own = classes.samples(label)
            shuffled = own[permutation(len(own), WITHIN_CLASS, seed, step, label)]
            chosen.append(shuffled[: min(self.images, missing)])
            missing -= len(chosen[-1])
            if missing == 0:
                break
        return np.concatenate(chosen)


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(count, EPOCH, seed, epoch)


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
        """(B,) the sample in each slot of a step's global batch."""
        return self.sampling.batch(self.classes, self.seed, step)

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


SAMPLING: dict[str, type[Sampling]] = {"random": RandomSampling, "p_by_k": PByKSampling}
