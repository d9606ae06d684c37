"""Batches of random images."""

from dataclasses import dataclass

from distap.data.plan import Classes, Samples, turns
from distap.errors import DistapError

IMAGES = 11  # first word of random keys; no two uses share one


@dataclass(frozen=True)
class RandomSampling:
    """Cut random orders of all images, one after the other, into batches.

    Each image comes once in an epoch, and none twice in a batch: where a batch holds the end of an epoch and the
    beginning of the next, images of the end come a little later in the next. A data set of less than two batches has
    no epochs; each batch is drawn anew.
    """

    batch_size: int = 4096
    """Number B of images in a global batch."""

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
        return next(turns(len(data), self.batch_size, step, IMAGES, seed))
