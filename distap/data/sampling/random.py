"""Batches of any images."""

from dataclasses import dataclass
from typing import Literal

from distap.data.plan import Classes, Samples
from distap.data.sampling.draws import epoch_order, refuse_more_than_there_are
from distap.errors import DistapError


@dataclass(frozen=True)
class RandomSampling:
    """A new order of all images each epoch, cut into batches; the rest that fills no batch waits for the next.

    Nothing is lost by that: the rest is drawn anew each epoch, so all images are used equally often. Carried on
    into the next epoch, it would meet some of its own images there, and no image may be in a batch twice.

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
        refuse_more_than_there_are(self.batch_size, classes)

    def steps_per_epoch(self, classes: Classes) -> int:
        """Whole batches in the data set."""
        return len(classes) // self.batch_size

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers."""
        epoch, turn = divmod(step, self.steps_per_epoch(classes))
        order = epoch_order(len(classes), seed, epoch)
        return order[turn * self.batch_size : (turn + 1) * self.batch_size]
