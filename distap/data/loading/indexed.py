"""Indexed reading: loader workers read, decode and augment the images that the plan of batches asks for."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distap.data.images.decoding import DamagedImageError
from distap.data.loading.reading import Reader
from distap.data.loading.training import NO_SAMPLE, Chunk, Failure, Loaded, LoadingJob, ShareOfBatch, shares_of
from distap.data.loading.workers import handed_over
from distap.data.plan import Classes, Plan
from distap.data.shards.index import Index, load_index
from distap.stopwatch import Stopwatch
from distap.world import World


@dataclass(frozen=True)
class IndexedSource:
    """Read image by image, from the places that the index of the shards gives."""

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "IndexedImages":
        return IndexedImages(job, world, stopwatch)


class IndexedImages:
    """Images that the plan of batches asks for one by one.

    Raises:
        DistapError: the index cannot be read, or such batches cannot be taken from the data set.
    """

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        index = load_index(job.source, job.remote)
        self.index: Index | None = index
        self.fingerprint = index.fingerprint
        self.plan = Plan(Classes(index.label, index.class_group), job.sampling, job.seed)
        self.size = job.sampling.size
        self._job, self._world, self._stopwatch = job, world, stopwatch
        self._reader = Reader(job.source, index, job.max_pixels, job.remote, job.cache)

    def shares(self, steps: range) -> Iterator[ShareOfBatch]:
        job, slots = self._job, self._world.slots(self.size)

        def requests(readings: int) -> Iterator[list[tuple[int, int, int]]]:
            for step in steps:
                batch = self.plan.batch(step)
                for _ in range(readings):
                    for start in range(0, len(slots), job.chunk):
                        yield [(step, slot, int(batch[slot])) for slot in slots[start : start + job.chunk]]

        def chunks(readings: int) -> Generator[Chunk]:
            images, collate = SlotImages(job, self._reader, self.plan), partial(_collated, self._reader)
            asked = requests(readings)
            return handed_over(images, job.workers, job.prefetch, batch_sampler=asked, collate_fn=collate)

        return shares_of(job, self._world, self._stopwatch, steps, chunks)

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # the plan is a function of the step

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


@dataclass(frozen=True)
class SlotImages(Dataset[tuple[Tensor, Loaded]]):
    """Images by (step, slot, sample), augmented by the randomness of (seed, step, slot).

    An image of the same class that is not in the batch replaces a damaged one; if there is none, the slot is empty.
    """

    job: LoadingJob
    reader: Reader
    plan: Plan

    def __getitem__(self, request: tuple[int, int, int]) -> tuple[Tensor, Loaded]:
        step, slot, sample = request
        failures: list[Failure] = []
        for candidate in self._candidates(step, slot, sample):
            name = self.reader.where(candidate)
            try:
                pixels = self.job.augmented(self.reader.encoded(candidate), step, slot)
            except DamagedImageError as error:
                failures.append(Failure(name, error.reason))
            else:
                return pixels, Loaded(candidate, int(self.plan.classes.labels[candidate]), name, failures)
        blank = torch.zeros(3, self.job.image_size, self.job.image_size, dtype=torch.uint8)
        return blank, Loaded(NO_SAMPLE, -1, self.reader.where(sample), failures)

    def _candidates(self, step: int, slot: int, sample: int) -> Iterator[int]:
        yield sample
        yield from self.plan.stand_ins(step, slot).tolist()


def _collated(reader: Reader, loaded: list[tuple[Tensor, Loaded]]) -> Chunk:
    pixels, images = zip(*loaded, strict=True)
    return Chunk(torch.stack(pixels), list(images), reader.take_traffic())
