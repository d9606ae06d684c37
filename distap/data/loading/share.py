"""The images of a training from any source, and one rank's share of a batch."""

import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.data.images.augmentation import Transform, require_pixels, seeded
from distap.data.images.damage import DamagedImageError, NoReaderError
from distap.data.images.decoding import EncodedImage
from distap.data.joined import MixedIndex
from distap.data.mixing import Weight
from distap.data.plan import Sampling
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index
from distap.data.shards.parallel import LONGEST_WAIT
from distap.data.sizing import PixelSettings
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.stopwatch import Stopwatch
from distap.storage.cache import CacheSettings
from distap.storage.locations import Source
from distap.storage.remotes import CONNECTIONS
from distap.world import World

AUGMENTATION = 21  # first word of the key that augmentation's randomness is drawn with
NO_SAMPLE = -1
# Reads further tensors of images, (n, ...), by their numbers; those of NO_SAMPLE are 0.
RowsOf = Callable[[NDArray[np.int64]], Mapping[str, NDArray[np.float32]]]

# Share of the steps from which each holds (the first from 0), width and height of pixels, and the
# transform.
Sizes = tuple[tuple[float, int, Transform], ...]


@dataclass(frozen=True)
class MixedSource:
    """Several data sets to train on."""

    sources: Mapping[str, Source]  # by the names of the sets
    weights: Mapping[str, Weight]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {source}" for name, source in self.sources.items())


@dataclass(frozen=True)
class LoadingJob:
    """Settings by which a training reads images, copied into its loader workers."""

    source: Source | MixedSource
    sampling: Sampling
    seed: int
    sizes: Sizes
    steps: int = 0  # of the whole training
    dimensions: int | None = None  # of descriptors, if they stand for pixels
    # images that a worker hands over at once; best as many as the network asks for at once
    chunk: int = 16
    workers: int = 0  # processes that read; 0 reads in the rank itself
    prefetch: int = 2  # chunks that each worker reads ahead
    requests: int = CONNECTIONS  # to a store that a worker has under way
    cache: CacheSettings | None = None  # of shards on this host's disk
    longest_wait: float = LONGEST_WAIT  # seconds for the next chunk
    pixels: PixelSettings = field(default_factory=PixelSettings)  # where pixels wait for the replay
    own_sizes: Mapping[str, Sizes] = field(default_factory=dict)  # of sets with other transforms

    def at(self, step: int, name: str = "") -> tuple[int, Transform]:
        """Return width and height of a step's pixels, and the transform of a set to them."""
        return next(
            (size, transform)
            for share, size, transform in self.own_sizes.get(name, self.sizes)[::-1]
            if step >= round(share * self.steps)
        )

    def augmented(self, image: EncodedImage, step: int, slot: int, name: str = "") -> Tensor:
        """Augment an image of a set, to (3, size, size) uint8, by the randomness of (seed, step,
        slot).
        """
        size, transform = self.at(step, name)
        pixels = seeded(transform, image, seed_for(AUGMENTATION, self.seed, step, slot))
        require_pixels(pixels, size, image)
        return pixels


def failure(where: str, error: DamagedImageError) -> Skipped:
    """Describe an image that could not be used.

    Raises:
        DistapError: the reader of its format is not installed.
    """
    if isinstance(error, NoReaderError):
        raise DistapError("package.missing", f"{where}: {error}") from error
    return Skipped(where, str(error))


class Chunk(NamedTuple):
    """n images from a loader worker."""

    # (n, 3, size, size) uint8, zero in the place of a missing image; or descriptors (n, C) float32
    pixels: NDArray[Any]
    samples: list[int]  # (n,) numbers of the images, NO_SAMPLE for a missing one
    # (n,), or (n, L) from the finest level: their classes, -1 for a missing image
    labels: NDArray[np.int64]
    names: list[str]  # (n,) their shards and keys; of the damaged image if nothing stands in for it
    # images, and those that were to stand in for them, that could not be used
    failures: list[Skipped]
    traffic: Counter[str]  # of reading them: the storage's `meter` since the chunk before


class HeldPixels:
    """A buffer for the pixels or descriptors of a share, which a rank's shares reuse in turn.

    They wait between describe and replay, in memory or in a mapped file, and come back byte for
    byte. If `pinned`, rows come back in page-locked memory, from which a GPU copies without
    waiting.
    """

    def __init__(
        self, settings: PixelSettings, shape: Sequence[int], dtype: torch.dtype, pinned: bool
    ) -> None:
        share_bytes = math.prod(shape) * dtype.itemsize
        self.spool_size_bytes = 0
        if share_bytes <= settings.memory_bytes:
            self._whole = torch.empty(*shape, dtype=dtype, pin_memory=pinned)
            self._pins = False
        else:
            self.spool_size_bytes = share_bytes
            mapped = _mapped_file(settings.spool_folder or Path(tempfile.gettempdir()), share_bytes)
            self._whole = torch.frombuffer(mapped, dtype=dtype).view(*shape)
            self._pins = pinned
        self.pixels = self._whole

    def keep(self, start: int, pixels: Tensor) -> None:
        """Store the pixels of the rows from `start` on; those of a step are of one size."""
        if pixels.shape[1:] != self.pixels.shape[1:]:
            shape = (len(self.pixels), *pixels.shape[1:])
            self.pixels = self._whole.view(-1)[: math.prod(shape)].view(shape)
        # By numpy: torch would wake all its threads for a copy, which then spin for a while and
        # take the cores from the loader workers.
        self.pixels[start : start + len(pixels)].numpy()[:] = pixels.numpy()

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return stored rows, valid until the next share is read."""
        # New page-locked memory each time: a copy to the GPU may still read the rows handed out
        # last.
        return self.pixels[rows].pin_memory() if self._pins else self.pixels[rows]


def _mapped_file(folder: Path, size: int) -> mmap.mmap:
    """Map an unnamed file. Its space is reserved: a disk full later would kill the process."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # the mapping lives on
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise DistapError(
            "storage.no_room",
            f"data.pixels.spool_folder: {folder}: no spool file can be made:"
            f" {error.strerror or error}. Each rank of the host has one: make room, set another"
            " folder, or spread the batch over more hosts",
        ) from error


class ShareOfBatch:
    """This rank's b images of a global batch, read when needed; pixels stay for the replay."""

    def __init__(
        self,
        step: int,
        total: int,
        count: int,
        held: HeldPixels,
        chunks: Iterator[Chunk],
        stopwatch: Stopwatch,
        order: Tensor | None = None,
        rows_of: RowsOf | None = None,
    ) -> None:
        self.step = step
        self.total = total
        self.order = order
        self.held = held
        self._chunks = chunks
        self._stopwatch = stopwatch
        self._rows_of = rows_of
        # Filled as images are read: the step takes rows of them at each micro-batch.
        self.samples = torch.full((count,), NO_SAMPLE)  # numbers of the images in the data set
        # Their classes, or (b, L) from the finest level; -1 for a missing image.
        self.labels = torch.full((count,), -1)
        self.extra: dict[str, Tensor] = {}  # further tensors of the images, (b, ...)
        self.names: list[str] = []  # of the images that were read so far
        self.failures: list[Skipped] = []
        self.traffic = Counter[str]()  # of what was read so far; workers read ahead

    @property
    def present(self) -> Tensor:
        """Return (b,) False for a missing image."""
        return self.samples != NO_SAMPLE

    def images(self, rows: slice | Tensor) -> Tensor:
        """Return (n, 3, size, size) uint8 pixels, valid until the next share is read.

        `rows` are from start to stop; or (n,) ascending, of rows that have been read.
        """
        with self._stopwatch.stage("data_wait"):
            while isinstance(rows, slice) and len(self.names) < rows.stop:
                self._read()
            return self.held.rows(rows)

    def blank(self, rows: Tensor) -> None:
        """Make the pixels of these images black."""
        self.held.pixels[rows.cpu()] = 0

    def _read(self) -> None:
        chunk = next(self._chunks)
        start = len(self.names)
        self.held.keep(start, torch.from_numpy(chunk.pixels))
        rows = slice(start, start + len(chunk.names))
        self.samples[rows] = torch.tensor(chunk.samples)
        if self.labels.ndim < chunk.labels.ndim:
            self.labels = self.labels[:, None].repeat(1, chunk.labels.shape[1])
        self.labels[rows] = torch.from_numpy(chunk.labels)
        if self._rows_of:
            # Here, and not at the end of describe: the disk answers while the GPU describes.
            for name, values in self._rows_of(np.array(chunk.samples)).items():
                if name not in self.extra:
                    self.extra[name] = torch.zeros(len(self.samples), *values.shape[1:])
                self.extra[name].numpy()[rows] = values
        self.names += chunk.names
        self.failures += chunk.failures
        self.traffic += chunk.traffic


class TrainingImages(ABC):
    """Images of a training as one rank sees them; a subclass reads `chunks` of them."""

    fingerprint: str  # a hash that stands for the data set in the state of a run
    order: int  # version of the way in which batches are drawn, which a run keeps
    index: Index | MixedIndex | None  # of the data set; None without one
    keeps_shards: ClassVar[bool] = False  # whether it can keep shards in a cache

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        if job.cache is not None and not self.keeps_shards:
            raise DistapError(
                "data.no_cache",
                f"data.cache is for shards with an index; {job.source} is read without one: leave"
                " it out, or set data.reading: indexed",
            )
        self.job = job
        self.world = world
        self.stopwatch = stopwatch
        self.size = job.sampling.size  # B, images of a global batch
        self.places = world.slots(self.size)  # of this rank's images in an exchange
        self.rows_of: RowsOf | None = None  # for losses that take further tensors of images
        self._held: HeldPixels | None = None

    @abstractmethod
    def chunks(self, steps: range) -> Generator[Chunk]:
        """Yield this rank's images of the batches of `steps`, a chunk at a time, in order."""

    def dealt(self, step: int) -> NDArray[np.int64] | None:
        """Return (B,) the slot at each place of an exchange; None: the place itself."""
        return None

    def slots(self, step: int) -> Sequence[int]:
        """Return this rank's slots of a step's batch, ascending."""
        order = self.dealt(step)
        if order is None:
            return self.places
        return [int(slot) for slot in order[self.places.start :: self.places.step]]

    def shares(self, steps: range, length: int | None = None) -> Generator[ShareOfBatch]:
        """Return this rank's shares of each step's batch; use one up before taking the next.

        Args:
            length: steps of the whole training; None: it ends with the last of `steps`.
        Raises:
            DistapError: at once, if there is no room for the pixels.
        """
        job = self.job = replace(self.job, steps=length or steps.stop)
        if self._held is None:
            shape: tuple[int, ...] = (len(self.places), job.dimensions or 0)
            dtype = torch.float32
            if job.dimensions is None:
                size = max(size for _, size, _ in job.sizes)
                shape = (len(self.places), 3, size, size)
                dtype = torch.uint8
            on_gpu = self.world.device.type == "cuda"
            self._held = HeldPixels(job.pixels, shape, dtype, pinned=on_gpu)
        return self._read(steps, self._held)

    def _read(self, steps: range, held: HeldPixels) -> Generator[ShareOfBatch]:
        with closing(self.chunks(steps)) as chunks:
            for step in steps:
                order = self.dealt(step)
                yield ShareOfBatch(
                    step,
                    self.size,
                    len(self.places),
                    held,
                    chunks,
                    self.stopwatch,
                    order=None if order is None else torch.from_numpy(order),
                    rows_of=self.rows_of,
                )
