"""Read the images that the plan asks for one by one, each by its offset in the shards."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from distap.data.images.damage import DamagedImageError
from distap.data.loading.reader import ImageSet
from distap.data.loading.share import NO_SAMPLE, Chunk, LoadingJob, TrainingImages, failure
from distap.data.plan import Plan
from distap.data.shards.image_folders import Skipped, warn_of
from distap.data.shards.index import Index, load_index
from distap.data.shards.parallel import in_processes
from distap.stopwatch import Stopwatch
from distap.world import World

Request = tuple[int, int, int]  # step, slot and the sample that the plan puts there


@dataclass(frozen=True)
class IndexedSource:
    """Read image by image, from the offsets in the index of the shards."""

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "IndexedImages":
        return IndexedImages(job, world, stopwatch)


class IndexedImages(TrainingImages):
    """Training images that are read one by one, as the plan of batches asks for them."""

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        super().__init__(job, world, stopwatch)
        # Each host compares its own shards once; shards behind a URL are the same for all hosts.
        compares = world.rank == 0 or (world.local_rank == 0 and not job.source.scheme)
        index = load_index(job.source, compares)
        if world.rank == 0:
            warn_of(str(job.source), index.left_out)
        self.index: Index | None = index
        self.fingerprint = index.fingerprint
        self.plan = Plan(index.classes, job.sampling, job.seed)
        self.order = self.plan.version
        self.read_from = ImageSet(job.source, index)

    def chunks(self, steps: range) -> Generator[Chunk]:
        job = self.job
        images = self.read_from
        plan = self.plan

        def requests() -> Iterator[list[Request]]:
            for step in steps:
                batch = plan.batch(step)
                for start in range(0, len(self.slots), job.chunk):
                    yield [
                        (step, slot, int(batch[slot]))
                        for slot in self.slots[start : start + job.chunk]
                    ]

        def first_image(requests: list[Request]) -> str:
            _, _, sample = requests[0]
            return images.where(sample)

        return in_processes(
            partial(_chunk, job, images, plan),
            requests(),
            job.workers,
            prefetch=job.prefetch,
            longest_wait=job.longest_wait,
            name=first_image,
            lends=True,
        )


def _chunk(job: LoadingJob, images: ImageSet, plan: Plan, requests: list[Request]) -> Chunk:
    """Read images by (step, slot, sample), augmented by the randomness of (seed, step, slot).

    An image of the same class that is not in the batch replaces a damaged one. If there is none,
    the slot stays empty.
    """
    before = images.storage.meter.copy()  # a fork begins with its parent's counts
    size, _ = job.at(requests[0][0])
    pixels = np.zeros((len(requests), 3, size, size), np.uint8)
    failures = list[Skipped]()
    samples = [NO_SAMPLE] * len(requests)
    names = [images.where(planned) for _, _, planned in requests]
    for row, (step, slot, planned) in enumerate(requests):
        for sample in _candidates(plan, step, slot, planned):
            try:
                pixels[row] = job.augmented(images.encoded(sample), step, slot).numpy()
            except DamagedImageError as error:
                failures.append(failure(images.where(sample), error))
            else:
                samples[row] = sample
                names[row] = images.where(sample)
                break
    # A missing image, -1, gets the last sample's labels for a moment, until the next line makes
    # them -1.
    labels = plan.classes.numbers[plan.classes.labels[samples]]
    labels[np.array(samples) == NO_SAMPLE] = -1
    return Chunk(pixels, samples, labels, names, failures, images.storage.meter - before)


def _candidates(plan: Plan, step: int, slot: int, sample: int) -> Iterator[int]:
    yield sample
    yield from plan.stand_ins(step, slot).tolist()
