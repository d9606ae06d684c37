"""Samplings whose elements, classes or images, take turns, from all shards or from windows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from distap.data.plan import Classes, Samples
from distap.data.turns import Turn, round_of
from distap.data.windows import Windows
from distap.errors import DistapError


@dataclass(frozen=True)
class InTurns(ABC):
    """A sampling whose elements, classes or images, take turns, by windows of shards if asked."""

    window: PositiveInt | None = field(default=None, kw_only=True)
    """Number of shards of a window: batches are drawn from one window of shards after the other, in
    a new random order of shards each epoch, so that each host can fetch whole shards ahead
    (data.cache). null draws from all shards."""
    mix: Literal["all", "one"] | None = field(default=None, kw_only=True)
    """Mixing of the sets of a data.train that names several: each batch holds all of them by their
    weights (`all`, which null means), or is of one of them, as often as its weight says (`one`)."""
    follow_loss: PositiveInt | None = field(default=None, kw_only=True)
    """Number of steps after which the weights of several sets follow their losses: each weight is
    multiplied by the set's mean loss in these steps. null keeps the weights."""

    unit: ClassVar[str]  # the key of the number of elements in a batch
    words: ClassVar[int]  # first word of the random keys of the order of elements
    may_vary: ClassVar[bool] = True  # whether batches may take unlike numbers of elements

    @property
    @abstractmethod
    def size(self) -> int: ...  # B, images of a global batch

    @abstractmethod
    def check(self, data: Classes) -> None:
        """Raise a DistapError if the data set cannot provide such batches."""

    @property
    def units(self) -> int:
        """Number of elements in a batch."""
        return int(getattr(self, self.unit))

    def of_units(self, units: int) -> Self:
        """Return this sampling for batches of `units` elements."""
        changed: dict[str, Any] = {self.unit: units}
        return replace(self, **changed)

    @abstractmethod
    def most_units(self, data: Classes) -> int:
        """Return how many elements of a data set a batch can take."""

    def turn(self, step: int) -> Turn:
        """Return what the batch of a step takes if all batches are of this data set alone."""
        return Turn(step, step * self.units, self.units, self.units)

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        return self.part(data, seed, self.turn(step))

    @abstractmethod
    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        """Return the numbers of the samples of the elements whose turn it is."""

    def windows(self, data: Classes) -> Windows | None:
        """Return the elements in windows of shards; None draws from all shards."""
        return None

    def spread(self, data: Classes, seed: int, step: int) -> NDArray[np.float64]:
        """Return `Plan.spread` for a step."""
        return self.spread_at(data, seed, self.turn(step))

    def spread_at(self, data: Classes, seed: int, turn: Turn) -> NDArray[np.float64]:
        """Return where each shard lies, from 0 to 1, among those that a batch draws from."""
        windows = self.windows(data)
        if windows is None:
            return data.spread
        round_number, key = round_of(len(windows.shards), turn, (self.words, seed))
        return windows.spread(round_number, len(data.spread), key)

    def require_shards(self, data: Classes) -> None:
        """Raise a DistapError if windows are asked for, and there are no shards."""
        if self.window is not None and data.shards is None:
            raise DistapError(
                "sampling.no_window",
                f"sampling.window is {self.window}, but each image is a file of its own, in no"
                " shard: pack the images with `distap data pack`, or leave it out",
            )

    def refuse_window(self, reason: str) -> None:
        """Raise a DistapError with the reason if windows are asked for."""
        if self.window is not None:
            raise DistapError(
                "sampling.no_window",
                f"sampling.window is {self.window}, but {reason}: leave it out; a data.cache that"
                " holds the whole data set saves all epochs but the first the network all the same",
            )


@lru_cache(maxsize=32)
def windows_of_images(data: Classes, length: int | None) -> Windows | None:
    """Return the images in windows; None without a length."""
    if length is None or data.shards is None:
        return None
    return Windows(data.shards.astype(np.int64), length)


@lru_cache(maxsize=32)
def windows_of_classes(data: Classes, length: int | None) -> Windows | None:
    """Return the classes with two images or more in windows, each in its first image's shard."""
    if length is None:
        return None
    return Windows(data.home_shards(data.with_pairs), length)
