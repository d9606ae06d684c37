"""Streamed reading: read whole shards in sequence, for shards without an index.

Each loader worker of each rank has shards of its own, a stream, and walks them in webdataset's pipeline: in a new
random order each pass, and shuffled within a shard. It promises less than indexed reading:
- Batches are a function of (shards, seed, step) for one number of ranks and of workers alone. A run that goes on with
  the same numbers reads on where it stopped, and neither loses nor repeats an image. With other numbers every stream
  begins a new pass.
- A batch holds what stands together in the shards, whatever its classes, so write the shards in a random order.
- The stream's next image takes the place of a damaged one, and all others move up.
- Images have no checksums, and only the names of its shards identify a data set.
- The numbers of images and classes, the damage and the classes shared with validation are unknown before reading.
"""

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.labels import class_name
from distap.data.loading.share import Chunk, Failure, LoadingJob, ShareOfBatch, shares_of
from distap.data.loading.streams import Cursor, Members, Stream, StreamedShards, number_of
from distap.data.sampling.random import RandomSampling
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.tar import LABEL_FIELD, MAX_DIGITS, TarMember, labelled_image
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.storage.texts import parsed_json
from distap.world import World

KEY = "__key__"  # webdataset's name for the name of a sample
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class StreamedSource:
    """Read shard by shard, from first to last byte; needs no index."""

    label: str = LABEL_FIELD
    """Member of a sample that holds its class, such as cls, txt or json; or __key__, the sample's own name. A whole
    number is the number of the class; any other text (but in cls) is the name of one."""
    label_key: str | None = None
    """Key of the class in a member that is JSON, with dots between the keys of nested objects."""
    shuffle: int = 128
    """Number of a shard's images that are held in memory, as files, to draw the next from; 1 keeps their order."""

    def __post_init__(self) -> None:
        if self.shuffle < 1:
            raise ValueError(f"shuffle is {self.shuffle}; expected 1 or more")

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "StreamedImages":
        return StreamedImages(self, job, world, stopwatch)

    def labelled(self, key: str, members: Members) -> Members:
        """Return a sample's members with the number of its class in `cls`, as in distap's own shards."""
        if (self.label, self.label_key) == (LABEL_FIELD, None):
            return members
        try:
            value: Any = key if self.label == KEY else members[self.label].data.decode().strip()
            if self.label_key is not None:
                value = parsed_json(value, object)
                for part in self.label_key.split("."):
                    value = value[part]
            return members | {LABEL_FIELD: TarMember("", 0, str(_class_number(value)).encode())}
        except (KeyError, TypeError, ValueError) as error:
            detail = f"key {key!r} has no class ({type(error).__name__}: {error})"
            raise DamagedImageError("missing_field", detail) from error


class StreamedImages:
    """Images of this rank's streams. Stream k of rank r of W reads shards number r + W k, modulo all."""

    def __init__(self, source: StreamedSource, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        if type(job.sampling) is not RandomSampling:
            raise DistapError(
                "data.reading is streamed, which takes images in the order of shards: set sampling to random"
            )
        self._source, self._job, self._world, self._stopwatch = source, job, world, stopwatch
        self._shards = StreamedShards(job.source, job.remote)
        shards, ranks = len(self._shards.names), world.size
        if shards < ranks:
            raise DistapError(
                f"{job.source}: {shards} shards for {ranks} ranks, each of which reads shards of its own: pack with "
                "a smaller --images-per-shard"
            )
        self._streams = range(world.rank, ranks * max(min(job.workers, shards // ranks), 1), ranks)
        self._cursors = [Cursor()] * len(self._streams)
        self.size, self.fingerprint, self.order = job.sampling.size, self._shards.fingerprint, 2

    @cached_property
    def index(self) -> Index | None:
        source = self._job.source
        try:
            return load_index(source, self._job.remote, compare=False)
        except DistapError:
            return None

    def shares(self, steps: range) -> Generator[ShareOfBatch]:
        return shares_of(self._job, self._world, self._stopwatch, steps, self._chunks(steps.start))

    def state_dict(self) -> dict[str, Tensor]:
        """Return `cursors`, (S, 3) int64: the position of each stream."""
        own = torch.tensor(self._cursors, dtype=torch.int64, device=self._world.device)
        return {"cursors": self._world.gather_rows(own, self._world.size * len(self._streams))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        cursors = state.get("cursors")
        if cursors is None or cursors.ndim != 2 or cursors.shape[1] != len(Cursor._fields) or not len(cursors):
            raise DistapError("the checkpoint does not say where the streams of shards go on; choose another run")
        ranks, streams = self._world.size, len(self._streams)
        if len(cursors) == ranks * streams:
            self._cursors = [Cursor(*row) for row in cursors[self._world.rank :: ranks].tolist()]
            return
        # Other shards belong together now, of which some are read and some are not: no place goes on for all.
        self._cursors = [Cursor(int(cursors[:, 0].max()) + 1)] * streams
        if self._world.rank == 0:
            logger.warning(
                "%s: read by %d streams before, by %d now (one a worker of each rank): all begin a new pass",
                self._job.source,
                len(cursors),
                ranks * streams,
            )

    def _chunks(self, first: int) -> Generator[Chunk]:
        """Yield this rank's images from step `first` on, in the order of slots."""
        job, slots, streams = self._job, self._world.slots(self.size), len(self._streams)
        # Chunk c of the run, counted over all steps, comes from stream c mod n: a run that goes on keeps the turns.
        begin = first * -(-len(slots) // job.chunk)
        images = StreamImages(self._source, job, self._shards, slots, self._streams, self._cursors, begin)
        chunks = job.chunks(images, min(job.workers, streams))
        with closing(chunks):
            for number, chunk in enumerate(chunks, begin):
                self._cursors[number % streams] = Cursor(*chunk.cursor)
                yield chunk


@dataclass(frozen=True)
class StreamImages(IterableDataset[Chunk]):
    """Endless chunks of a rank's images; worker w of n yields chunks begin + w, begin + w + n, ..."""

    source: StreamedSource
    job: LoadingJob
    shards: StreamedShards
    slots: range  # of the rank
    streams: range  # numbers of the rank's streams
    cursors: list[Cursor]  # their positions
    begin: int

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        first, own = self.begin + (worker.id if worker else 0), len(self.streams)
        place = first % own
        shards = range(self.streams[place], len(self.shards.names), len(self.streams) * self.streams.step)
        stream = Stream(
            self.shards, shards, self.streams[place], self.job.seed, self.source.shuffle, self.cursors[place]
        )
        parts = [self.slots[start : start + self.job.chunk] for start in range(0, len(self.slots), self.job.chunk)]
        for number in count(first, own):
            step, part = divmod(number, len(parts))
            yield self._chunk(stream, step, parts[part])

    def _chunk(self, stream: Stream, step: int, slots: range) -> Chunk:
        pixels, samples, labels, names = list[Tensor](), list[int](), list[int](), list[str]()
        failures: list[Failure] = []
        for slot in slots:
            for name, key, members in stream.candidates(step):
                try:
                    label, image, _ = labelled_image(key, self.source.labelled(key, members))
                    pixels.append(self.job.augmented(EncodedImage(image.data, self.job.max_pixels, name), step, slot))
                except DamagedImageError as error:
                    failures.append(Failure.of(name, error))
                else:
                    samples.append(number_of(name))
                    labels.append(label)
                    names.append(name)
                    break
        return Chunk(torch.stack(pixels), samples, labels, names, failures, self.shards.meter.take(), stream.cursor)


def _class_number(value: Any) -> int:
    """Return a class's number: a whole number itself, or a number for its name, the same in every run."""
    name = class_name(value)
    if not name:
        raise ValueError(f"its label {value!r:.40} stands for no class")
    is_number = name == "0" or (name.isdecimal() and name.isascii() and name[0] != "0" and len(name) <= MAX_DIGITS)
    return int(name) if is_number else number_of(name) % 10**MAX_DIGITS
