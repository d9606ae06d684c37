"""What the loop of a training needs of its images, whichever way they are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from distap.data.loading.indexed import IN_MEMORY, ShareOfBatch, SlotImages, training_shares
from distap.data.loading.pixels import PixelSettings
from distap.data.shards.index import Index
from distap.stopwatch import Stopwatch


@dataclass(frozen=True)
class LoaderSettings:
    """How a rank's images are read ahead, and wait.

    Args:
        chunk: images that a worker hands over at once; best as many as the network asks for at once.
        workers: processes that read; 0 reads in the rank itself.
        prefetch: chunks that each worker reads ahead.
        pinned: keep pixels in page-locked memory, from which a GPU copies without waiting.
        pixels: how pixels wait for the replay.
    """

    chunk: int
    workers: int
    prefetch: int
    pinned: bool = False
    pixels: PixelSettings = IN_MEMORY


class TrainingImages(Protocol):
    """The images of a training as one rank sees them."""

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that stands for the data set in the state of a run."""
        ...

    @property
    def index(self) -> Index | None:
        """Of the data set; None where it is read without."""
        ...

    def shares(self, steps: range) -> Iterator[ShareOfBatch]:
        """This rank's share of the global batch of each step; a share is to be used up before the next is taken."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What going on after the last step needs beside its number; the same on every rank, which all ask."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state."""
        ...


class IndexedImages:
    """Images that are read one by one, by what the index says of them, as the plan of batches asks for them.

    Args:
        images: those of the plan.
        slots: of this rank in a global batch.
        settings: how they are read.
        stopwatch: counts the waiting as `data_wait`.
    """

    def __init__(self, images: SlotImages, slots: range, settings: LoaderSettings, stopwatch: Stopwatch) -> None:
        self._images, self._slots, self._settings, self._stopwatch = images, slots, settings, stopwatch
        self.size = images.plan.size
        self.index: Index | None = images.reader.index
        self.fingerprint = images.reader.index.fingerprint

    def shares(self, steps: range) -> Iterator[ShareOfBatch]:
        """This rank's share of the global batch of each step."""
        settings = self._settings
        return training_shares(
            self._images,
            self._slots,
            steps,
            settings.chunk,
            settings.workers,
            settings.prefetch,
            self._stopwatch,
            settings.pinned,
            settings.pixels,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: the plan is a function of the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to do."""
