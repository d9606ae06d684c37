"""From the plan to this rank's pixels: DataLoader workers read, decode and augment ahead of the network."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distap.data.decoding import DamagedImageError, Reason
from distap.data.plan import Plan
from distap.data.reading import Reader
from distap.data.transforms import Transform, seeded
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.stopwatch import Stopwatch

AUGMENTATION = 21  # first word of the key that augmentation's randomness is drawn with
NO_SAMPLE = -1


class Failure(NamedTuple):
    """An image that could not be used: its shard and key, and why."""

    where: str
    reason: Reason


class Chunk(NamedTuple):
    """Some images as a worker hands them over."""

    pixels: Tensor  # (n, 3, size, size) uint8, zero where there is no image
    samples: list[int]  # numbers in the index, NO_SAMPLE where there is no image
    failures: list[Failure]


class _Loaded(NamedTuple):
    pixels: Tensor
    sample: int
    failures: list[Failure]


class SlotImages(Dataset[_Loaded]):
    """Images by (step, slot, sample), augmented by the randomness of (seed, step, slot).

    A damaged image is replaced by one of its class that is not in the batch; where there is none, the slot
    stays empty.
    """

    def __init__(self, reader: Reader, plan: Plan, transform: Transform, size: int) -> None:
        self.reader, self.plan, self.transform, self.size = reader, plan, transform, size

    def __getitem__(self, request: tuple[int, int, int]) -> _Loaded:
        step, slot, sample = request
        failures: list[Failure] = []
        for candidate in self._candidates(step, slot, sample):
            try:
                seed = seed_for(AUGMENTATION, self.plan.seed, step, slot)
                pixels = seeded(self.transform, self.reader.encoded(candidate), seed)
            except DamagedImageError as error:
                failures.append(Failure(self.reader.where(candidate), error.reason))
            else:
                return _Loaded(pixels, candidate, failures)
        return _Loaded(_no_pixels(self.size), NO_SAMPLE, failures)

    def _candidates(self, step: int, slot: int, sample: int) -> Iterator[int]:
        yield sample
        yield from self.plan.stand_ins(step, slot).tolist()


class OrderedImages(Dataset[_Loaded]):
    """Images by number, for evaluation: a damaged one is left out, since nothing can stand in for it."""

    def __init__(self, reader: Reader, transform: Transform, size: int) -> None:
        self.reader, self.transform, self.size = reader, transform, size

    def __getitem__(self, sample: int) -> _Loaded:
        try:
            return _Loaded(self.transform(self.reader.encoded(sample)), sample, [])
        except DamagedImageError as error:
            return _Loaded(_no_pixels(self.size), NO_SAMPLE, [Failure(self.reader.where(sample), error.reason)])


class ShareOfBatch:
    """This rank's share of a global batch, read as it is asked for; its pixels stay for the replay."""

    def __init__(
        self, step: int, total: int, pixels: Tensor, chunks: Iterator[Chunk], plan: Plan, stopwatch: Stopwatch
    ) -> None:
        self.step = step
        self.total = total
        self.samples: list[int] = []
        self.failures: list[Failure] = []
        self._pixels = pixels
        self._chunks = chunks
        self._labels = plan.classes.labels
        self._stopwatch = stopwatch

    @property
    def labels(self) -> Tensor:
        """(b,) int64 classes of the images; -1 where there is no image."""
        labels = [int(self._labels[sample]) if sample != NO_SAMPLE else -1 for sample in self.samples]
        return torch.tensor(labels, dtype=torch.int64)

    @property
    def present(self) -> Tensor:
        """(b,) bool, False where there is no image."""
        return torch.tensor([sample != NO_SAMPLE for sample in self.samples])

    def images(self, rows: slice) -> Tensor:
        """(n, 3, size, size) uint8 pixels of some of the share's images."""
        with self._stopwatch.stage("data_wait"):
            while len(self.samples) < rows.stop:
                chunk = next(self._chunks)
                start = len(self.samples)
                self._pixels[start : start + len(chunk.samples)] = chunk.pixels
                self.samples += chunk.samples
                self.failures += chunk.failures
        return self._pixels[rows]

    def blank(self, rows: Tensor) -> None:
        """Make these images black."""
        self._pixels[rows.cpu()] = 0


def training_shares(
    images: SlotImages,
    slots: range,
    steps: range,
    chunk: int,
    workers: int,
    prefetch: int,
    stopwatch: Stopwatch,
    pinned: bool = False,
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
    """

    def requests() -> Iterator[list[tuple[int, int, int]]]:
        for step in steps:
            batch = images.plan.batch(step)
            for start in range(0, len(slots), chunk):
                yield [(step, slot, int(batch[slot])) for slot in slots[start : start + chunk]]

    chunks = _loaded(images, requests(), workers, prefetch)
    pixels = torch.empty(len(slots), 3, images.size, images.size, dtype=torch.uint8, pin_memory=pinned)
    for step in steps:
        yield ShareOfBatch(step, images.plan.size, pixels, chunks, images.plan, stopwatch)


def evaluation_chunks(images: OrderedImages, samples: range, chunk: int, workers: int) -> Iterator[Chunk]:
    """The images of some samples, in order, `chunk` at a time."""
    requests = (list(samples[start : start + chunk]) for start in range(0, len(samples), chunk))
    return _loaded(images, requests, workers, prefetch=2)


def _loaded(images: Dataset[_Loaded], requests: Iterable[list[Any]], workers: int, prefetch: int) -> Iterator[Chunk]:
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_sampler=requests,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        collate_fn=_collate,
        worker_init_fn=_quiet_worker,
    )
    try:
        yield from loader
    except DistapError as error:
        # The loader has put the worker's traceback before the message that is meant for the user.
        raise DistapError(str(error).rpartition("DistapError: ")[2].strip()) from None


def _collate(loaded: list[_Loaded]) -> Chunk:
    failures = [failure for image in loaded for failure in image.failures]
    return Chunk(torch.stack([image.pixels for image in loaded]), [image.sample for image in loaded], failures)


def _quiet_worker(_: int) -> None:
    """Leave an interrupt from the keyboard to the rank, which ends its workers."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _no_pixels(size: int) -> Tensor:
    return torch.zeros(3, size, size, dtype=torch.uint8)
