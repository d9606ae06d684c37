"""Read the images that the plan asks for, each by its offset in the shards."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess

import numpy as np

from distap.data.images.damage import DamagedImageError
from distap.data.joined import MixedImages, MixedIndex
from distap.data.loading.cached import CachedShards
from distap.data.loading.filler import Filler
from distap.data.loading.reader import ImageBytes, ImageSet
from distap.data.loading.share import (
    NO_SAMPLE,
    Chunk,
    LoadingJob,
    MixedSource,
    TrainingImages,
    failure,
)
from distap.data.mixing import mixed, naming_set, numbers_of
from distap.data.plan import PLAN_VERSION, Classes, Plan
from distap.data.sampling.some_of_each import SomeOfEach
from distap.data.shards.image_folders import Skipped, warn_of
from distap.data.shards.index import Index, load_index
from distap.data.shards.parallel import in_processes
from distap.errors import DistapError, logger
from distap.randomness import Numbers
from distap.stopwatch import Stopwatch
from distap.storage.locations import Source
from distap.world import World

MOST_SCATTERED = 0.1  # share of the images that may lie in other shards than their class
LEAST_USED = 0.5  # share of the images that a pass takes, for whole shards to be worth fetching
Request = tuple[int, int, int]  # step, slot and the sample that the plan puts there


@dataclass(frozen=True)
class IndexedSource:
    """Read the images of a batch wherever they are, by their offsets in the index of the shards."""

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "IndexedImages":
        return IndexedImages(job, world, stopwatch)


class IndexedImages(TrainingImages):
    """Training images that are read as the plan of batches asks for them."""

    keeps_shards = True

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        super().__init__(job, world, stopwatch)
        sampling = job.sampling
        self.read_from: ImageSet | MixedImages
        self.index: Index | MixedIndex | None
        if isinstance(job.source, MixedSource):
            sets = dict[str, ImageSet]()
            for name, source in job.source.sources.items():
                with naming_set(name):
                    sets[name] = self.opened(source)
            self.read_from = MixedImages(sets)
            self.index = self.read_from.index
            images = {name: len(opened) for name, opened in sets.items()}
            sampling = mixed(job.sampling, numbers_of(job.source.weights, images))
        else:
            self.read_from = self.opened(job.source)
            self.index = self.read_from.index
        self.fingerprint = self.index.fingerprint
        self.plan = Plan(self.index.classes, sampling, job.seed)
        self.order = PLAN_VERSION
        self.shards: CachedShards | None = None
        self.filler: BaseProcess | None = None  # that fetches shards ahead
        if world.rank == 0 and isinstance(job.sampling, SomeOfEach) and job.sampling.window:
            for _, classes in self.plan.classes.parts:
                _warn_of_windows(job.sampling, classes, fetches=job.cache is not None)
        if job.cache is not None:
            self._require_shards()
            chunks = self.read_from.ahead(job.chunk, job.requests) * max(job.workers, 1)
            chunks += job.workers * job.prefetch
            self.shards = CachedShards(
                job.cache, self.read_from, self.plan, world, read_ahead=chunks * job.chunk
            )

    def draw_by(self, plan: Plan) -> None:
        """Draw batches by another plan from now on."""
        self.plan = plan
        if self.shards is not None:
            self.shards.plan = plan

    def opened(self, source: Source) -> ImageSet:
        """Open a data set, and warn of what is not in it."""
        world = self.world
        # Each host compares its own shards once; shards behind a URL are the same for all hosts.
        compares = world.rank == 0 or (world.local_rank == 0 and not source.scheme)
        index = load_index(source, compares)
        if world.rank == 0:
            warn_of(str(source), index.left_out)
        return ImageSet(source, index)

    def _require_shards(self) -> None:
        """Raise a DistapError if a set has no shards, which alone can be cached."""
        images = self.read_from
        for opened in images.sets if isinstance(images, MixedImages) else [images]:
            if opened.index.classes.shards is None or opened.source.kind != "shards":
                raise DistapError(
                    "data.no_cache",
                    f"data.cache is for shards, and {opened.name} has none: pack the images with"
                    " `distap data pack`, or leave data.cache out",
                )

    def dealt(self, step: int) -> Numbers | None:
        return self.plan.order(step, self.world.size)

    def chunks(self, steps: range) -> Generator[Chunk]:
        job = self.job
        images = self.read_from
        plan = self.plan

        images.drained()  # what was read before, such as the index

        def requests() -> Iterator[list[Request]]:
            for step in steps:
                batch = plan.batch(step)
                slots = self.slots(step)
                for start in range(0, len(slots), job.chunk):
                    yield [
                        (step, slot, int(batch[slot])) for slot in slots[start : start + job.chunk]
                    ]

        def first_image(requests: list[Request]) -> str:
            _, _, sample = requests[0]
            return images.where(sample)

        chunks = in_processes(
            partial(_chunk, job, images, plan),
            requests(),
            job.workers,
            prefetch=job.prefetch,
            longest_wait=job.longest_wait,
            name=first_image,
            lends=True,
            fetch=images.fetching(
                partial(_files, images, self.shards, job.requests), job.chunk, job.requests
            ),
        )
        return chunks if self.shards is None else self._filled(chunks, steps, self.shards)

    def _filled(
        self, chunks: Generator[Chunk], steps: range, shards: CachedShards
    ) -> Generator[Chunk]:
        """Yield chunks while another process fetches the shards of later steps."""
        chunks_of_step = -(-len(self.places) // self.job.chunk)
        with closing(Filler(shards, steps)) as filler, closing(chunks):
            self.filler = filler.process
            for number, chunk in enumerate(chunks):
                fetched = filler.at(steps.start + number // chunks_of_step)
                yield chunk._replace(traffic=chunk.traffic + fetched)


def _warn_of_windows(sampling: SomeOfEach, classes: Classes, fetches: bool) -> None:
    """Warn if windows of shards hold few whole classes, or a pass uses little of a shard."""
    if classes.scattered > MOST_SCATTERED:
        logger.warning(
            "sampling.window: %.0f%% of the images lie in other shards than the first of their"
            " class, so a window needs many shards besides its own: `distap data pack` keeps a"
            " class in one shard",
            100 * classes.scattered,
        )
    used = classes.available(classes.with_pairs, sampling.images) / len(classes)
    if fetches and used < LEAST_USED:
        logger.warning(
            "data.cache: a pass takes %d images of each class, %.0f%% of the data set, but fetches"
            " all of its shards: to read less from the store, leave data.cache and sampling.window"
            " out, or let the cache hold the whole data set",
            sampling.images,
            100 * used,
        )


def _files(
    images: ImageSet | MixedImages,
    shards: CachedShards | None,
    most: int,
    requests: list[Request],
) -> list[ImageBytes]:
    samples = [sample for _, _, sample in requests]
    if shards is None:
        return images.files(samples, most)
    step, _, _ = requests[0]  # a chunk is of one step
    return shards.files(step, samples, most)


def _chunk(
    job: LoadingJob,
    images: ImageSet | MixedImages,
    plan: Plan,
    requests: list[Request],
    files: Sequence[ImageBytes] | None = None,
) -> Chunk:
    """Augment images, given their (step, slot, sample), by the randomness of (seed, step, slot).

    `files` are those of the images, if they were read already.
    An image of the same class that is not in the batch replaces a damaged one. If there is none,
    the slot stays empty.
    """
    size, _ = job.at(requests[0][0])
    pixels = np.zeros((len(requests), 3, size, size), np.uint8)
    failures = list[Skipped]()
    samples = [NO_SAMPLE] * len(requests)
    names = [images.where(planned) for _, _, planned in requests]
    for row, (step, slot, planned) in enumerate(requests):
        # A stand-in is of the same set.
        name = images.name_of_set(planned) if isinstance(images, MixedImages) else ""
        for sample in _candidates(plan, step, slot, planned):
            # A stand-in, which is rare, is read alone.
            file = files[row] if files is not None and sample == planned else None
            try:
                encoded = images.encoded(sample, file)
                pixels[row] = job.augmented(encoded, step, slot, name).numpy()
            except DamagedImageError as error:
                failures.append(failure(images.where(sample), error))
            else:
                samples[row] = sample
                names[row] = images.where(sample)
                break
    # A missing image, -1, gets the first sample's labels for a moment, until the next line makes
    # them -1.
    labels = plan.classes.numbers[plan.classes.labels_of(np.maximum(samples, 0))]
    labels[np.array(samples) == NO_SAMPLE] = -1
    return Chunk(pixels, samples, labels, names, failures, images.drained())


def _candidates(plan: Plan, step: int, slot: int, sample: int) -> Iterator[int]:
    yield sample
    yield from plan.stand_ins(step, slot).tolist()
