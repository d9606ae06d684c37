"""What a step is given: a rank's share of a global batch."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
        """Classes of the images, known once every image has been asked for."""
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Numbers of the images in the data set, known once every image has been asked for."""
        ...

    @property
    def present(self) -> Bool[Tensor, " b"]:
        """False for an image that could not be read."""
        ...

    def images(self, rows: Rows) -> Tensor:
        """Pixels of some of the share's images, (n, ...); waits for those that have not been read yet."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Forget the pixels of these images: the network cannot describe them."""
        ...
