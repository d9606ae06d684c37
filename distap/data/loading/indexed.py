"""Read images by number, each by its offset in the shards: those to describe, and those that the plan asks for."""

import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, EncodedImage, image_size
from distap.data.loading.share import NO_SAMPLE, Chunk, Failure, LoadingJob, ShareOfBatch, shares_of
from distap.data.map_style import DatasetRows, rows_behind
from distap.data.plan import PLAN_VERSION, Plan
from distap.data.shards.image_folders import Skipped, warn_of
from distap.data.shards.index import Index
from distap.data.shards.load_index import index_of_folder, load_index
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings, Traffic, UnreachableError
from distap.world import World

HEADER_BYTES = 1 << 16  # the header of nearly every image fits in them
Request = tuple[int, int, int]  # step, slot and the sample that the plan puts there


class Reader:
    """Read images of a data set, each by its place in a shard; safe to copy into loader workers.

    Args:
        source: the data set.
        index: the index of the same data set.
        max_pixels: images with more pixels (width times height) are refused without decoding.
        remote: how a remote source is reached, and how often reading is tried.
    """

    def __init__(
        self,
        source: Source | Path | str,
        index: Index,
        max_pixels: int = MAX_PIXELS,
        remote: RemoteSettings | None = None,
    ) -> None:
        self.source, self.index, self.max_pixels = parse_source(source), index, max_pixels
        rows = rows_behind(self.source)
        self.storage: Storage | DatasetRows = storage_of(self.source.base, remote) if rows is None else rows

    def encoded(self, sample: int) -> EncodedImage:
        """Return an image's file, not decoded yet; raise DamagedImageError if its bytes changed or are no image."""
        return EncodedImage(self.data(sample), self.max_pixels, self.where(sample))

    def data(self, sample: int) -> bytes:
        """Return the image's encoded bytes, checked against the index."""
        shard, offset, size = (int(of[sample]) for of in (self.index.shard, self.index.offset, self.index.size))
        try:
            data = self.storage.read(str(self.index.shard_name[shard]), offset, size)
        except DistapError as error:  # a file that is gone or may not be read, unless the disk itself fails
            if self.source.kind != "imagefolder" or isinstance(error, UnreachableError):
                raise
            raise DamagedImageError("decode_error", str(error)) from error
        if self._damage(sample, data) and self.source.scheme:
            # A network may have changed the bytes on their way: read them once more.
            self.storage.meter.add(Traffic(retries=1))
            data = self.storage.read(str(self.index.shard_name[shard]), offset, size)
        if damage := self._damage(sample, data):
            raise damage
        return data

    def where(self, sample: int) -> str:
        """Return shard and name of a sample, for messages."""
        if isinstance(self.storage, DatasetRows):
            return self.storage.where(sample)
        shard, name = self.index.shard_name[self.index.shard[sample]], self.index.names[sample]
        return name if self.source.kind == "imagefolder" else f"{shard}:{name}"

    def size(self, sample: int) -> tuple[int, int]:
        """Read width and height of the decoded image from the file's header; (0, 0) if unknown."""
        try:
            if self.source.kind == "imagefolder" and self.index.size[sample] > HEADER_BYTES:
                name = str(self.index.shard_name[sample])
                with suppress(DamagedImageError, DistapError):  # then all of it may tell
                    return image_size(self.storage.read(name, 0, HEADER_BYTES), self.max_pixels, upright=True)
            return image_size(self.data(sample), self.max_pixels, upright=True)
        except DamagedImageError:
            return 0, 0

    def _damage(self, sample: int, data: bytes) -> DamagedImageError | None:
        size = int(self.index.size[sample])
        if len(data) < size:
            return DamagedImageError("truncated", f"{len(data)} bytes of {size}")
        if int(self.index.crc32[sample]) not in (0, zlib.crc32(data)):
            return DamagedImageError("crc_mismatch", "the bytes have changed since they were indexed")
        return None


@dataclass(frozen=True)
class ImageSet:
    """N images in order, with their names and their reader."""

    name: str  # as it was given
    fingerprint: str  # identifies the images
    keys: NDArray[np.str_]  # (N,) name of each, unlike all others
    classes: NDArray[np.str_]  # (N,) name of its class, "" for none
    reader: Reader
    left_out: tuple[Skipped, ...] = ()  # files that are not read, and why

    def __len__(self) -> int:
        return len(self.keys)

    def sizes(self, samples: Sequence[int]) -> NDArray[np.int64]:
        """Read (n, 2) width and height in pixels from headers; they may be wrong and serve planning only.

        Those of shards are as stored, before EXIF's orientation; (0, 0) is unknown.
        """
        if self.reader.source.kind == "shards":
            index, rows = self.reader.index, np.asarray(samples, dtype=np.int64)
            return np.stack([index.width[rows], index.height[rows]], axis=1).astype(np.int64)
        return np.array([self.reader.size(sample) for sample in samples], dtype=np.int64).reshape(-1, 2)


def open_images(
    source: Source | Path | str,
    max_pixels: int = MAX_PIXELS,
    remote: RemoteSettings | None = None,
) -> ImageSet:
    """Open the images of shards (see `Reader`), or of a local folder without index and shards."""
    source = parse_source(source)
    if _is_plain(source):
        index, source = index_of_folder(source, labelled=False), replace(source, kind="imagefolder")
    else:
        index = load_index(source, remote)
    keys = index.names
    if len(np.unique(keys)) < len(keys):  # each shard of other makers may count from 0
        shards = index.shard_name[index.shard].tolist()
        keys = np.array([f"{shard}:{key}" for shard, key in zip(shards, index.key.tolist(), strict=True)])
    reader = Reader(source, index, max_pixels, remote)
    return ImageSet(str(source), index.fingerprint, keys, index.class_name[index.label], reader, index.left_out)


def _is_plain(source: Source) -> bool:
    folder = Path(source.base)
    is_named = source.pattern is not None or source.kept_index is not None or source.kind != "shards"
    if source.scheme or is_named or not folder.is_dir():
        return False
    return not Path(source.index).exists() and next(folder.glob("*.tar"), None) is None


@dataclass(frozen=True)
class IndexedSource:
    """Read image by image, from the offsets in the index of the shards."""

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "IndexedImages":
        return IndexedImages(job, world, stopwatch)


class IndexedImages:
    """Training images that are read one by one, as the plan of batches asks for them."""

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        # Once for a host's own shards; those behind a URL are the same for all.
        compares = world.rank == 0 or (world.local_rank == 0 and not job.source.scheme)
        index = load_index(job.source, job.remote, compares)
        if world.rank == 0:
            warn_of(str(job.source), index.left_out)
        self.index: Index | None = index
        self.fingerprint, self.order = index.fingerprint, PLAN_VERSION
        self.plan = Plan(index.classes, job.sampling, job.seed)
        self.size = job.sampling.size
        self._job, self._world, self._stopwatch = job, world, stopwatch
        self._reader = Reader(job.source, index, job.max_pixels, job.remote)

    def shares(self, steps: range) -> Generator[ShareOfBatch]:
        job, slots = replace(self._job, steps=steps.stop), self._world.slots(self.size)

        def requests() -> Iterator[list[Request]]:
            for step in steps:
                batch = self.plan.batch(step)
                for start in range(0, len(slots), job.chunk):
                    yield [(step, slot, int(batch[slot])) for slot in slots[start : start + job.chunk]]

        images = SlotImages(job, self._reader, self.plan)
        chunks = job.chunks(images.chunk, job.workers, requests(), lambda asked: self._reader.where(asked[0][2]))
        return shares_of(job, self._world, self._stopwatch, steps, chunks)


@dataclass(frozen=True)
class SlotImages:
    """Read chunks of images by (step, slot, sample), augmented by the randomness of (seed, step, slot).

    An image of the same class that is not in the batch replaces a damaged one; if there is none, the slot is empty.
    """

    job: LoadingJob
    reader: Reader
    plan: Plan

    def chunk(self, requests: list[Request]) -> Chunk:
        size, _ = self.job.at(requests[0][0])
        pixels = torch.zeros(len(requests), 3, size, size, dtype=torch.uint8)
        failures = list[Failure]()
        samples = [self._read(request, row, failures) for request, row in zip(requests, pixels, strict=True)]
        used = zip(requests, samples, strict=True)
        names = [self.reader.where(asked[2] if sample == NO_SAMPLE else sample) for asked, sample in used]
        classes = self.plan.classes
        labels = torch.from_numpy(classes.numbers[classes.labels[samples]])
        labels[torch.tensor(samples) == NO_SAMPLE] = -1
        return Chunk(pixels, samples, labels, names, failures, self.reader.storage.meter.take())

    def _read(self, request: Request, pixels: Tensor, failures: list[Failure]) -> int:
        """Read an image into `pixels`, or a stand-in if it is damaged; return the number of the one used."""
        step, slot, planned = request
        for sample in self._candidates(step, slot, planned):
            try:
                pixels.copy_(self.job.augmented(self.reader.encoded(sample), step, slot))
            except DamagedImageError as error:
                failures.append(Failure.of(self.reader.where(sample), error))
            else:
                return sample
        return NO_SAMPLE

    def _candidates(self, step: int, slot: int, sample: int) -> Iterator[int]:
        yield sample
        yield from self.plan.stand_ins(step, slot).tolist()
