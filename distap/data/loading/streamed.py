"""Streamed reading: read whole shards in sequence, for shards without an index.

Each loader worker of each rank has shards of its own, a stream, and walks them in a new random
order each pass, shuffled within a shard by webdataset's buffer. distap's strict tar reader replaces
webdataset's, which loses samples without a word: at a changed bit in a header, or a cut at a
block's end.

It promises less than indexed reading:
- Batches are a function of (shards, seed, first step) for one number of ranks and of workers alone.
  A run that goes on begins a new pass over all shards, in an order of its own.
- A batch holds what stands together in the shards, whatever its classes, so write the shards in a
  random order.
- The stream's next image takes the place of a damaged one, and all others move up.
- Images have no checksums, and only the names of its shards identify a data set.
- The numbers of images and classes, the damage and the classes shared with validation are unknown
  before reading.
"""

import hashlib
import random
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count

import numpy as np
import webdataset
from numpy.typing import NDArray
from pydantic import PositiveInt

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.loading.share import Chunk, LoadingJob, TrainingImages, failure
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import load_index
from distap.data.shards.indexing import check_numbering
from distap.data.shards.parallel import in_processes
from distap.data.shards.shard_names import shard_names
from distap.data.shards.tar import TarMember, labelled_image, read_groups
from distap.errors import DistapError
from distap.randomness import permutation, seed_for
from distap.stopwatch import Stopwatch
from distap.storage.files import Storage
from distap.storage.locations import Source
from distap.world import World

STREAMED_VERSION = 1001  # of the order of images, unlike all of PLAN_VERSION
# First words of random keys; no two uses share one.
SHARD_ORDER = 24
WITHIN_SHARD = 25

Members = dict[str, TarMember]  # the files of a sample by their endings
Candidate = tuple[str, str, Members]  # shard and key of a sample, its key alone, its members


@dataclass(frozen=True)
class StreamedSource:
    """Read shard by shard, from first to last byte; needs no index."""

    shuffle: PositiveInt = 128
    """Number of a shard's images that are held in memory, as files, to draw the next from; 1 keeps
    their order."""

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "StreamedImages":
        return StreamedImages(self, job, world, stopwatch)


class StreamedImages(TrainingImages):
    """Images of this rank's streams.

    Stream k of rank r of W reads shards number r + W k, modulo all.
    Chunk c of the rank's images, counted over all steps, comes from stream c mod n. So worker w of
    n, which is asked for the chunks w, w + n, ... from the first on, reads one stream.
    """

    def __init__(
        self, source: StreamedSource, job: LoadingJob, world: World, stopwatch: Stopwatch
    ) -> None:
        super().__init__(job, world, stopwatch)
        self._source = source
        shards_of = job.source
        assert isinstance(shards_of, Source)  # a recipe of several sets is refused
        self._storage = Storage(shards_of.base)
        self._names = shard_names(shards_of, self._storage)
        check_numbering(shards_of, self._storage, self._names, warns=world.rank == 0)
        shards = len(self._names)
        ranks = world.size
        if shards < ranks:
            raise DistapError(
                "data.too_few_shards",
                f"{job.source}: {shards} shards for {ranks} ranks, each of which reads shards of"
                " its own: pack with a smaller --images-per-shard",
            )
        self._streams = range(world.rank, ranks * max(min(job.workers, shards // ranks), 1), ranks)
        # Of the shards' names, since their contents are unknown before reading.
        self.fingerprint = hashlib.sha256(
            "\0".join(self._names).encode(errors="backslashreplace")
        ).hexdigest()
        self.order = STREAMED_VERSION
        self.index = None
        with suppress(DistapError):
            self.index = load_index(shards_of, compare=False)

    def chunks(self, steps: range) -> Generator[Chunk]:
        job = self.job
        chunks = [
            self.places[start : start + job.chunk]
            for start in range(0, len(self.places), job.chunk)
        ]
        shards = list(enumerate(self._names))
        distance = len(self._streams) * self.world.size
        streams = [
            Stream(
                number,
                shards=shards[number::distance],
                job=job,
                shuffle=self._source.shuffle,
                storage=self._storage,
                first_step=steps.start,
            )
            for number in self._streams
        ]
        return in_processes(
            partial(_chunk, streams, chunks),
            count(steps.start * len(chunks)),
            min(job.workers, len(streams)),
            prefetch=job.prefetch,
            longest_wait=job.longest_wait,
            lends=True,
        )


@dataclass
class Stream:
    """Samples of one stream, which one worker reads."""

    number: int  # of the stream, unlike all others; and of its first shard
    shards: list[tuple[int, str]]  # number among all shards, and name
    job: LoadingJob
    shuffle: int  # images of a shard to draw the next from
    storage: Storage
    first_step: int
    step: int = -1
    in_batch: set[str] = field(default_factory=set)  # names of the images of a step that were used

    @cached_property
    def walked(self) -> Iterator[Candidate | None]:
        return self._walk()

    def candidates(self, step: int) -> Iterator[Candidate]:
        """Yield further samples that the batch does not hold yet; the caller stops at a sound one.

        At the seam of two passes an image may come up again within a batch, as its own positive: it
        is left out.
        """
        if step != self.step:
            self.step = step
            self.in_batch = set()
        ends = 0  # of passes; between two of them lies a whole one
        while ends < 2:
            sample = next(self.walked)
            if sample is None:
                ends += 1
            elif sample[0] not in self.in_batch:
                self.in_batch.add(sample[0])
                yield sample
        raise DistapError(
            "data.too_few_images",
            f"{self.job.source}: a loader worker has only {len(self.in_batch)} images in its"
            f" {len(self.shards)} shards, too few for its part of a batch, in which no image may be"
            " twice, or too many of them damaged: set sampling.batch_size or data.workers lower",
        )

    def _walk(self) -> Iterator[Candidate | None]:
        """Yield each sample of each pass, without end, and None at the end of a pass.

        The first pass is the one of number `first_step`.
        """
        for turn in count(self.first_step):
            order = permutation(len(self.shards), SHARD_ORDER, self.job.seed, self.number, turn)
            for place in order.tolist():
                number, name = self.shards[place]
                drawing = random.Random(seed_for(WITHIN_SHARD, self.job.seed, turn, number))
                mixed = webdataset.shuffle(self.shuffle, initial=self.shuffle, rng=drawing)
                length = self.storage.size(name)
                with self.storage.open(name, length) as file:
                    for key, members in mixed(read_groups(file, length, self.storage.where(name))):
                        yield f"{name}:{key}", key, members
            yield None


def _chunk(streams: list[Stream], chunks: list[range], number: int) -> Chunk:
    """Read chunk `number` of a rank's images; `chunks` are the slots of each in a batch."""
    stream = streams[number % len(streams)]
    step, place = divmod(number, len(chunks))
    rows = list[tuple[NDArray[np.uint8], int, int, str]]()
    failures = list[Skipped]()
    for slot in chunks[place]:
        for name, key, members in stream.candidates(step):
            try:
                label, image, _ = labelled_image(key, members)
                encoded = EncodedImage(image.data, name=name)
                pixels = stream.job.augmented(encoded, step, slot).numpy()
            except DamagedImageError as error:
                failures.append(failure(name, error))
            else:
                rows.append((pixels, _number(name), label, name))
                break
    images, samples, labels, names = map(list, zip(*rows, strict=True))
    traffic = stream.storage.drained()
    return Chunk(np.stack(images), samples, np.array(labels), names, failures, traffic)


def _number(name: str) -> int:
    """Return a number of 63 bits that stands for an image, the same on every machine."""
    digest = hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1
