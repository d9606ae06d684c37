"""Batches of any images."""

from dataclasses import dataclass

from distap.data.plan import Classes, Samples, epoch_order
from distap.errors import DistapError


@dataclass(frozen=True)
class RandomSampling:
    """Cut a random order of all images into batches, with a new order each epoch.

    The images left at the end of an epoch, too few for a batch, are not carried over: the next epoch draws a new
    order of all images, so all are used equally often. Carried over, they could meet themselves in a batch.
    """

    batch_size: int = 4096  # B, images of a global batch

    @property
    def size(self) -> int:
        return self.batch_size

    def check(self, data: Classes) -> None:
        if self.batch_size < 2:
            raise DistapError(f"sampling.batch_size is {self.batch_size}; ranking needs at least 2 images")
        if self.batch_size > len(data):
            only = f"the data set has only {len(data)} images and no image may be in a batch twice"
            raise DistapError(f"sampling.batch_size is {self.batch_size}, but {only}: set it to {len(data)} or less")

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        epoch, turn = divmod(step, len(data) // self.batch_size)
        order = epoch_order(len(data), seed, epoch)
        return order[turn * self.batch_size : (turn + 1) * self.batch_size]
