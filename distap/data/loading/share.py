"""The images of a training as its loop sees them, whichever source reads them, and one rank's share of a batch."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from distap.data.images.augmentation import Croppable, Transform, seeded
from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, NoReaderError, Reason
from distap.data.images.gpu_decoding import GPUDecoder, StoredJPEG
from distap.data.loading.pixels import HeldPixels, Reread, held_pixels
from distap.data.loading.workers import LONGEST_WAIT
from distap.data.plan import Sampling
from distap.data.settings import CacheSettings, PixelSettings
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.stopwatch import Stopwatch
from distap.storage.locations import Source
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Traffic
from distap.world import World

AUGMENTATION = 21  # first word of the key that augmentation's randomness is drawn with
NO_SAMPLE = -1


@dataclass(frozen=True)
class LoadingJob:
    """The images that a training asks of a source (`data.reading`); safe to copy into loader workers."""

    source: Source
    sampling: Sampling
    seed: int
    transform: Transform
    image_size: int  # width and height of the pixels
    chunk: int = 16  # images that a worker hands over at once; best as many as the network asks for at once
    workers: int = 0  # processes that read; 0 reads in the rank itself
    prefetch: int = 2  # chunks that each worker reads ahead
    longest_wait: float = LONGEST_WAIT  # seconds for the next chunk
    pixels: PixelSettings = field(default_factory=PixelSettings)  # where pixels wait for the replay
    max_pixels: int = MAX_PIXELS  # images with more (width times height) are refused without decoding
    remote: RemoteSettings | None = None
    cache: CacheSettings | None = None  # of shards on this host's disk
    decode: Literal["cpu", "gpu"] = "cpu"  # by workers, or by the rank on its device

    @property
    def handing_over(self) -> dict[str, Any]:
        """Options of `handed_over`."""
        ahead = self.workers * self.prefetch * self.chunk * 3 * self.image_size**2
        return {"longest_wait": self.longest_wait, "bytes_ahead": ahead}

    def augmented(self, image: Croppable, step: int, slot: int) -> Tensor:
        """(3, size, size) uint8: the image as a slot of a step gets it, a function of seed, step and slot alone."""
        return seeded(self.transform, image, seed_for(AUGMENTATION, self.seed, step, slot))


class TrainingImages(Protocol):
    """The images of a training as one rank sees them."""

    size: int  # B, images of a global batch
    fingerprint: str  # a hash that stands for the data set in the state of a run
    order: int  # version of the way in which batches are drawn, which a run keeps
    index: Index | None  # of the data set; None without one

    def shares(self, steps: range) -> "Iterator[ShareOfBatch]":
        """This rank's share of each step's global batch; use a share up before you take the next."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state after the last step but for its number, the same on every rank; all ranks call it."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state."""


class Failure(NamedTuple):
    """An image that could not be used: its shard and key, and the reason."""

    where: str
    reason: Reason

    @classmethod
    def of(cls, where: str, error: DamagedImageError) -> "Failure":
        """Raises a DistapError if the reader of the image's format is not installed."""
        if isinstance(error, NoReaderError):
            raise DistapError(f"{where}: {error}") from error
        return cls(where, error.reason)


class Loaded(NamedTuple):
    """An image that was read, beside its pixels."""

    sample: int  # number of the image, NO_SAMPLE for a missing one
    label: int  # its class, -1 for a missing image
    name: str  # its shard and key; of the damaged image if nothing stands in for it
    failures: list[Failure]  # the image, and those that were to stand in for it, as far as they could not be used


class Chunk(NamedTuple):
    """Some images as a worker hands them over."""

    pixels: Tensor  # (n, 3, size, size) uint8, zero in the place of a missing image; of those not in `encoded`
    images: list[Loaded]
    traffic: Traffic  # of reading them
    cursors: list[tuple[int, ...]] = []  # noqa: RUF012 - positions of the worker's streams behind them, if it has any
    encoded: dict[int, StoredJPEG] = {}  # noqa: RUF012 - images that the rank is to decode, by their row

    def decoded(self, decoder: GPUDecoder) -> "Chunk":
        """The chunk with all its pixels; what cannot be decoded is missing."""
        images, pixels, ready = list(self.images), list[Tensor](), iter(self.pixels)
        found = dict(zip(self.encoded, decoder(list(self.encoded.values())), strict=True))
        for row, image in enumerate(images):
            given = found[row] if row in found else next(ready)
            if isinstance(given, DamagedImageError):
                images[row] = Loaded(NO_SAMPLE, -1, image.name, [*image.failures, Failure.of(image.name, given)])
                given = self.pixels.new_zeros(self.pixels.shape[1:])
            pixels.append(given)
        return self._replace(pixels=torch.stack(pixels), images=images, encoded={})


@dataclass(eq=False)
class ShareOfBatch:
    """This rank's share of a global batch, read as it is asked for; its pixels wait for the replay."""

    step: int
    total: int  # B, images of the global batch
    count: int  # b, images of this share
    room: InitVar[HeldPixels | None]  # where the pixels wait; None reads them again: `chunks` has each share twice
    chunks: Iterator[Chunk]  # the images of this share; other shares may follow
    stopwatch: Stopwatch  # counts the seconds of waiting as `data_wait`

    def __post_init__(self, room: HeldPixels | None) -> None:
        # Filled as images are read: the step asks for rows of them at each micro-batch.
        self.samples = torch.full((self.count,), NO_SAMPLE)  # numbers of the images in the data set
        self.labels = torch.full((self.count,), -1)  # their classes; -1 for a missing image
        self.present = torch.zeros(self.count, dtype=torch.bool)  # False for a missing image
        self.names: list[str] = []  # shards and keys; of the damaged image if nothing stands in for it
        self.failures: list[Failure] = []
        self.traffic = Traffic()  # of what was read so far; workers read ahead
        self.held: HeldPixels = room or Reread(self._read_again, self.names.__getitem__)
        self._recent: list[tuple[int, Tensor]] = []  # first row and pixels of the chunks that were read last
        self._again = 0  # rows that have been read again

    def images(self, rows: slice | Tensor) -> Tensor:
        """(n, 3, size, size) uint8 pixels of some of the share's images, valid until others are asked for.

        `rows` are from start to stop; or (n,) ascending, of rows that have been read.
        """
        with self.stopwatch.stage("data_wait"):
            if not isinstance(rows, slice):
                return self.held.rows(rows)
            self._recent = [part for part in self._recent if part[0] + len(part[1]) > rows.start]
            while len(self.names) < rows.stop:
                self._read()
            if not self._recent or self._recent[0][0] > rows.start:
                return self.held.rows(rows)
            # Describe reads row after row: what it asks for has just come from the workers.
            near = [part for part in self._recent if part[0] < rows.stop]
            parts = [pixels[max(rows.start - first, 0) : rows.stop - first] for first, pixels in near]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def blank(self, rows: Tensor) -> None:
        """Make these images black."""
        self._recent = []
        self.held.blank(rows.tolist())

    def _read(self) -> None:
        chunk = next(self.chunks)
        first = len(self.names)
        self._recent.append((first, self.held.keep(first, chunk.pixels)))
        rows = slice(first, first + len(chunk.images))
        self.samples[rows] = torch.tensor([image.sample for image in chunk.images])
        self.labels[rows] = torch.tensor([image.label for image in chunk.images])
        self.present[rows] = self.samples[rows] != NO_SAMPLE
        self.names += [image.name for image in chunk.images]
        self.failures += chain(*(image.failures for image in chunk.images))
        self.traffic = self.traffic.plus(chunk.traffic)

    def _read_again(self) -> Tensor:
        chunk = next(self.chunks)
        self.traffic = self.traffic.plus(chunk.traffic)
        for row, image in enumerate(chunk.images, self._again):
            if image.sample != self.samples[row]:
                reasons = ", ".join(f"{failure.where}: {failure.reason}" for failure in image.failures)
                raise DistapError(
                    f"{self.names[row]}: this image could be read for describe but cannot be read again for replay "
                    f"({reasons or 'or the other way round'}): mend its storage, or set data.pixels.hold to spool"
                )
        self._again += len(chunk.images)
        return chunk.pixels


def shares_of(
    job: LoadingJob, world: World, stopwatch: Stopwatch, steps: range, chunks: Callable[[int], Generator[Chunk]]
) -> Iterator[ShareOfBatch]:
    """A rank's shares of the global batches of these steps; a DistapError tells at once if there is no room.

    `chunks` makes this rank's images of all these steps; it is told how often each share is to be read.
    """
    count, pinned = len(world.slots(job.sampling.size)), world.device.type == "cuda"
    room = held_pixels(job.pixels, count, job.image_size, pinned)

    def shares() -> Iterator[ShareOfBatch]:
        with closing(chunks(1 if room else 2)) as loaded:
            for step in steps:
                share = ShareOfBatch(step, job.sampling.size, count, room, loaded, stopwatch)
                yield share
                if isinstance(share.held, Reread):
                    share.held.finish()

    return shares()
