"""Batches at random from all images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from distap.data.plan import Classes, Samples
from distap.data.sampling.in_turns import InTurns, windows_of_images
from distap.data.turns import Turn, turns
from distap.data.windows import Windows
from distap.errors import DistapError

TwoOrMore = Annotated[int, Field(ge=2)]

IMAGE_ORDER = 11  # first word of random keys; no two uses share one


@dataclass(frozen=True)
class RandomSampling(InTurns):
    """Cut random orders of all images, one after the other, into batches.

    Each image comes once in an epoch, and none twice in a batch: where a batch holds the end of an
    epoch and the beginning of the next, images of the end come a little later in the next. A data
    set of less than two batches has no epochs; each batch is drawn anew.
    """

    batch_size: TwoOrMore = 4096
    """Number B of images in a global batch."""

    unit: ClassVar[str] = "batch_size"
    words: ClassVar[int] = IMAGE_ORDER

    @property
    def size(self) -> int:
        return self.batch_size

    def check(self, data: Classes) -> None:
        self.require_shards(data)
        if self.batch_size > len(data):
            raise DistapError(
                "sampling.too_few_images",
                f"sampling.batch_size is {self.batch_size}, but the data set has only {len(data)}"
                " images and no image may be in a batch twice: set it to"
                f" {len(data)} or less",
            )

    def most_units(self, data: Classes) -> int:
        return len(data)

    def part(self, data: Classes, seed: int, turn: Turn) -> Samples:
        windows = self.windows(data)
        return next(turns(len(data), turn, self.words, seed, windows=windows))

    def windows(self, data: Classes) -> Windows | None:
        return windows_of_images(data, self.window)
