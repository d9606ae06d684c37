"""From the plan to this rank's pixels: DataLoader workers read, decode and augment ahead of the network."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distap.data.images.decoding import DamagedImageError, Reason
from distap.data.images.transforms import Croppable, Transform, seeded
from distap.data.loading.pixels import HeldPixels, PixelSettings, Reread, held_pixels
from distap.data.loading.reading import Reader
from distap.data.loading.workers import handed_over
from distap.data.plan import Plan
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.stopwatch import Stopwatch
from distap.storage.traffic import Traffic

AUGMENTATION = 21  # first word of the key that augmentation's randomness is drawn with
NO_SAMPLE = -1
IN_MEMORY = PixelSettings(hold="memory")


class Failure(NamedTuple):
    """An image that could not be used: its shard and key, and why."""

    where: str
    reason: Reason


class Chunk(NamedTuple):
    """Some images as a worker hands them over."""

    pixels: Tensor  # (n, 3, size, size) uint8, zero where there is no image
    samples: list[int]  # numbers of the images, NO_SAMPLE where there is none
    labels: list[int]  # classes, -1 where there is no image
    names: list[str]  # shards and keys; of the damaged image where nothing stands in for it
    failures: list[Failure]
    traffic: Traffic  # what reading them took


class Loaded(NamedTuple):
    """An image that was read, or what is known of one that could not be."""

    pixels: Tensor
    sample: int
    label: int
    name: str
    failures: list[Failure]


class SlotImages(Dataset[Loaded]):
    """Images by (step, slot, sample), augmented by the randomness of (seed, step, slot).

    A damaged image is replaced by one of its class that is not in the batch; where there is none, the slot
    stays empty.
    """

    def __init__(self, reader: Reader, plan: Plan, transform: Transform, size: int) -> None:
        self.reader, self.plan, self.transform, self.size = reader, plan, transform, size

    def __getitem__(self, request: tuple[int, int, int]) -> Loaded:
        step, slot, sample = request
        failures: list[Failure] = []
        for candidate in self._candidates(step, slot, sample):
            name = self.reader.where(candidate)
            try:
                pixels = augmented(self.transform, self.reader.encoded(candidate), self.plan.seed, step, slot)
            except DamagedImageError as error:
                failures.append(Failure(name, error.reason))
            else:
                return Loaded(pixels, candidate, int(self.plan.classes.labels[candidate]), name, failures)
        return _missing(self.size, self.reader.where(sample), failures)

    def _candidates(self, step: int, slot: int, sample: int) -> Iterator[int]:
        yield sample
        yield from self.plan.stand_ins(step, slot).tolist()


def augmented(transform: Transform, image: Croppable, seed: int, step: int, slot: int) -> Tensor:
    """(3, size, size) uint8: what a slot of a step gets of an image, a function of these alone."""
    return seeded(transform, image, seed_for(AUGMENTATION, seed, step, slot))


class OrderedImages(Dataset[Loaded]):
    """Images by number, for evaluation: a damaged one is left out, since nothing can stand in for it."""

    def __init__(self, reader: Reader, transform: Transform, size: int) -> None:
        self.reader, self.transform, self.size = reader, transform, size

    def __getitem__(self, sample: int) -> Loaded:
        name = self.reader.where(sample)
        try:
            pixels = self.transform(self.reader.encoded(sample))
        except DamagedImageError as error:
            return _missing(self.size, name, [Failure(name, error.reason)])
        return Loaded(pixels, sample, int(self.reader.index.label[sample]), name, [])


class ShareOfBatch:
    """This rank's share of a global batch, read as it is asked for; its pixels wait for the replay.

    Args:
        step: whose batch it is.
        total: B, images of the global batch.
        held: where the pixels wait; None reads them again, which `chunks` then repeats.
        chunks: the share's images; other shares may follow.
        stopwatch: counts the waiting as `data_wait`.
    """

    def __init__(
        self,
        step: int,
        total: int,
        held: HeldPixels | None,
        chunks: Iterator[Chunk],
        stopwatch: Stopwatch,
    ) -> None:
        self.step = step
        self.total = total
        self.samples: list[int] = []
        self.names: list[str] = []  # shards and keys; of the damaged image where nothing stands in for it
        self.failures: list[Failure] = []
        self.traffic = Traffic()  # of what was read so far; workers read ahead
        self._labels: list[int] = []
        self._chunks = chunks
        self._recent: list[tuple[int, Tensor]] = []  # chunks that were read last: their first rows, their pixels
        self._again = 0  # rows that have been read again
        self._held: HeldPixels = held or Reread(self._read_again, self.names.__getitem__)
        self._stopwatch = stopwatch

    @property
    def labels(self) -> Tensor:
        """(b,) int64 classes of the images; -1 where there is no image."""
        return torch.tensor(self._labels, dtype=torch.int64)

    @property
    def present(self) -> Tensor:
        """(b,) bool, False where there is no image."""
        return torch.tensor([sample != NO_SAMPLE for sample in self.samples])

    @property
    def spool_size_bytes(self) -> int:
        """What this rank's spool file takes of its file system; 0 without one."""
        return self._held.spool_size_bytes

    @property
    def spool_limit_bytes(self) -> int:
        """What the spool file could take: its size and what the file system has left; 0 without one."""
        return self._held.spool_limit_bytes

    def images(self, rows: slice | Tensor) -> Tensor:
        """(n, 3, size, size) uint8 pixels of some of the share's images, valid until others are asked for.

        Args:
            rows: from start to stop; or (n,) ascending, of rows that have been read.
        """
        with self._stopwatch.stage("data_wait"):
            if isinstance(rows, slice):
                self._recent = [part for part in self._recent if part[0] + len(part[1]) > rows.start]
            while isinstance(rows, slice) and len(self.samples) < rows.stop:
                chunk = next(self._chunks)
                self._recent.append((len(self.samples), self._held.keep(len(self.samples), chunk.pixels)))
                self.samples += chunk.samples
                self.names += chunk.names
                self._labels += chunk.labels
                self.failures += chunk.failures
                self.traffic = self.traffic.plus(chunk.traffic)
            if isinstance(rows, slice) and self._recent and self._recent[0][0] <= rows.start:
                parts = [
                    pixels[max(rows.start - first, 0) : rows.stop - first]
                    for first, pixels in self._recent
                    if first < rows.stop
                ]
                return parts[0] if len(parts) == 1 else torch.cat(parts)
            return self._held.rows(rows)

    def blank(self, rows: Tensor) -> None:
        """Make these images black."""
        self._recent = []
        self._held.blank(rows.tolist())

    def finish(self) -> None:
        """Leave no images of this share before those of the next."""
        if isinstance(self._held, Reread):
            self._held.finish()

    def _read_again(self) -> Tensor:
        chunk = next(self._chunks)
        self.traffic = self.traffic.plus(chunk.traffic)
        for row, sample in enumerate(chunk.samples, self._again):
            if sample != self.samples[row]:
                reasons = ", ".join(f"{failure.where}: {failure.reason}" for failure in chunk.failures)
                raise DistapError(
                    f"{self.names[row]}: what could be read for describe cannot be read again for replay "
                    f"({reasons or 'or the other way round'}); data must not change during a training. Mend its "
                    "storage, or set data.pixels.hold to spool, which reads once"
                )
        self._again += len(chunk.samples)
        return chunk.pixels


def training_shares(
    images: SlotImages,
    slots: range,
    steps: range,
    chunk: int,
    workers: int,
    prefetch: int,
    stopwatch: Stopwatch,
    pinned: bool = False,
    pixels: PixelSettings = IN_MEMORY,
) -> Iterator[ShareOfBatch]:
    """This rank's share of the global batch of each step; a share is to be used up before the next is taken.

    Args:
        images: the images of the plan.
        slots: this rank's slots of a global batch.
        steps: the steps to train.
        chunk: images that a worker hands over at once.
        workers: processes that read; 0 reads in this one.
        prefetch: chunks that each worker reads ahead.
        stopwatch: counts the waiting as `data_wait`.
        pinned: keep pixels in page-locked memory, from which a GPU copies without waiting.
        pixels: how pixels wait for the replay.
    Raises:
        DistapError: at once, where there is no room for the pixels.
    """
    held = held_pixels(pixels, len(slots), images.size, pinned)
    readings = 1 if held is not None else 2

    def requests() -> Iterator[list[tuple[int, int, int]]]:
        for step in steps:
            batch = images.plan.batch(step)
            for _ in range(readings):
                for start in range(0, len(slots), chunk):
                    yield [(step, slot, int(batch[slot])) for slot in slots[start : start + chunk]]

    return shares_of(_loaded(images, requests(), workers, prefetch), steps, images.plan.size, held, stopwatch)


def shares_of(
    loaded: Generator[Chunk, None, None], steps: range, total: int, held: HeldPixels | None, stopwatch: Stopwatch
) -> Iterator[ShareOfBatch]:
    """A rank's shares of global batches of `total` images, from its chunks of all these steps."""
    with closing(loaded) as chunks:
        for step in steps:
            share = ShareOfBatch(step, total, held, chunks, stopwatch)
            yield share
            share.finish()


def evaluation_chunks(images: OrderedImages, samples: range, chunk: int, workers: int) -> Iterator[Chunk]:
    """The images of some samples, in order, `chunk` at a time."""
    requests = (list(samples[start : start + chunk]) for start in range(0, len(samples), chunk))
    return _loaded(images, requests, workers, prefetch=2)


def _loaded(
    images: SlotImages | OrderedImages, requests: Iterable[list[Any]], workers: int, prefetch: int
) -> Generator[Chunk, None, None]:
    collate = partial(_collate, images.reader)
    return handed_over(images, workers, prefetch, batch_sampler=requests, collate_fn=collate)


def _collate(reader: Reader, loaded: list[Loaded]) -> Chunk:
    return chunk_of(loaded, reader.take_traffic())


def chunk_of(loaded: list[Loaded], traffic: Traffic) -> Chunk:
    """Images that are handed over together, and what reading them took."""
    pixels, samples, labels, names, failures = zip(*loaded, strict=True)
    return Chunk(torch.stack(pixels), list(samples), list(labels), list(names), list(chain(*failures)), traffic)


def _missing(size: int, name: str, failures: list[Failure]) -> Loaded:
    return Loaded(torch.zeros(3, size, size, dtype=torch.uint8), NO_SAMPLE, -1, name, failures)
