"""Read the images that the plan asks for one by one, each by its offset in the shards."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import DamagedImageError
from distap.data.loading.reader import Reader
from distap.data.loading.share import NO_SAMPLE, Chunk, Failure, LoadingJob, ShareOfBatch, shares_of
from distap.data.plan import PLAN_VERSION, Plan
from distap.data.shards.image_folders import warn_of
from distap.data.shards.index import Index, load_index
from distap.stopwatch import Stopwatch
from distap.world import World

Request = tuple[int, int, int]  # step, slot and the sample that the plan puts there


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
        index = load_index(job.source, compares)
        if world.rank == 0:
            warn_of(str(job.source), index.left_out)
        self.index: Index | None = index
        self.fingerprint, self.order = index.fingerprint, PLAN_VERSION
        self.plan = Plan(index.classes, job.sampling, job.seed)
        self.size = job.sampling.size
        self._job, self._world, self._stopwatch = job, world, stopwatch
        self._reader = Reader(job.source, index)

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
        before = self.reader.storage.meter.copy()  # a fork begins with its parent's counts
        size, _ = self.job.at(requests[0][0])
        pixels = np.zeros((len(requests), 3, size, size), np.uint8)
        failures = list[Failure]()
        samples = [self._read(request, row, failures) for request, row in zip(requests, pixels, strict=True)]
        used = zip(requests, samples, strict=True)
        names = [self.reader.where(asked[2] if sample == NO_SAMPLE else sample) for asked, sample in used]
        classes = self.plan.classes
        labels = classes.numbers[classes.labels[samples]]
        labels[np.array(samples) == NO_SAMPLE] = -1
        return Chunk(pixels, samples, labels, names, failures, self.reader.storage.meter - before)

    def _read(self, request: Request, pixels: NDArray[np.uint8], failures: list[Failure]) -> int:
        """Read an image into `pixels`, or a stand-in if it is damaged; return the number of the one used."""
        step, slot, planned = request
        for sample in self._candidates(step, slot, planned):
            try:
                pixels[:] = self.job.augmented(self.reader.encoded(sample), step, slot).numpy()
            except DamagedImageError as error:
                failures.append(Failure.of(self.reader.where(sample), error))
            else:
                return sample
        return NO_SAMPLE

    def _candidates(self, step: int, slot: int, sample: int) -> Iterator[int]:
        yield sample
        yield from self.plan.stand_ins(step, slot).tolist()
