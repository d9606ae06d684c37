"""The input of a step: one rank's share of a global batch."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Int64
from torch import Tensor

from distap.stages.micro_batches import Rows


@runtime_checkable
class Batch(Protocol):
    """This rank's share of a global batch: the slots rank, rank + W, ... of `total`."""

    step: int
    total: int

    @property
    def labels(self) -> Int64[Tensor, " b"]:
        """Classes of the images; complete once every image was asked for."""
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Numbers of the images in the data set; complete once every image was asked for."""
        ...

    @property
    def present(self) -> Bool[Tensor, " b"]:
        """False for an image that could not be read."""
        ...

    def images(self, rows: Rows) -> Any:
        """Return what the network takes for these rows, such as pixels (n, ...); wait while they are being read."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Replace the pixels of these images, which the network cannot describe, by zeros."""
        ...
