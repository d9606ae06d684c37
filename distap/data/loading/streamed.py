"""Streamed reading: read whole shards in sequence, for shards without an index.

Each loader worker of each rank has shards of its own, a stream, and walks them in webdataset's pipeline: in a new
random order each pass, and shuffled within a shard. It promises less than indexed reading:
- Batches are a function of (shards, seed, first step) for one number of ranks and of workers alone. A run that goes
  on begins a new pass over all shards, in an order of its own.
- A batch holds what stands together in the shards, whatever its classes, so write the shards in a random order.
- The stream's next image takes the place of a damaged one, and all others move up.
- Images have no checksums, and only the names of its shards identify a data set.
- The numbers of images and classes, the damage and the classes shared with validation are unknown before reading.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.labels import class_name
from distap.data.loading.share import Chunk, Failure, LoadingJob, ShareOfBatch, shares_of
from distap.data.loading.streams import Members, Stream, StreamedShards, number_of
from distap.data.sampling.random import RandomSampling
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.tar import LABEL_FIELD, MAX_DIGITS, TarMember, labelled_image
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.storage.texts import parsed_json
from distap.world import World

KEY = "__key__"  # webdataset's name for the name of a sample


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
        self.size, self.fingerprint, self.order = job.sampling.size, self._shards.fingerprint, 3

    @cached_property
    def index(self) -> Index | None:
        source = self._job.source
        try:
            return load_index(source, self._job.remote, compare=False)
        except DistapError:
            return None

    def shares(self, steps: range) -> Generator[ShareOfBatch]:
        return shares_of(self._job, self._world, self._stopwatch, steps, self._chunks(steps.start))

    def _chunks(self, first: int) -> Generator[Chunk]:
        """Yield this rank's images from step `first` on, in the order of slots."""
        job, slots = self._job, self._world.slots(self.size)
        images = StreamImages(self._source, job, self._shards, slots, self._streams, first)
        return job.chunks(images, min(job.workers, len(self._streams)), count(first * images.parts))


@dataclass(frozen=True)
class StreamImages:
    """Endless chunks of a rank's images: chunk c, counted over all steps, comes from stream c mod n.

    So worker w of n, which is asked for the chunks w, w + n, ... from the first on, reads one stream.
    """

    source: StreamedSource
    job: LoadingJob
    shards: StreamedShards
    slots: range  # of the rank
    streams: range  # numbers of the rank's streams
    first: int  # step

    @property
    def parts(self) -> int:
        """Return the number of chunks in the rank's share of a batch."""
        return -(-len(self.slots) // self.job.chunk)

    @cached_property
    def _opened(self) -> dict[int, Stream]:
        return {}

    def __getitem__(self, number: int) -> Chunk:
        place = number % len(self.streams)
        if place not in self._opened:
            every = len(self.streams) * self.streams.step
            shards, own = self.shards, range(self.streams[place], len(self.shards.names), every)
            self._opened[place] = Stream(
                shards, own, self.streams[place], self.job.seed, self.source.shuffle, self.first
            )
        step, part = divmod(number, self.parts)
        start = part * self.job.chunk
        return self._chunk(self._opened[place], step, self.slots[start : start + self.job.chunk])

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
        return Chunk(torch.stack(pixels), samples, torch.tensor(labels), names, failures, self.shards.meter.take())


def _class_number(value: Any) -> int:
    """Return a class's number: a whole number itself, or a number for its name, the same in every run."""
    name = class_name(value)
    if not name:
        raise ValueError(f"its label {value!r:.40} stands for no class")
    is_number = name == "0" or (name.isdecimal() and name.isascii() and name[0] != "0" and len(name) <= MAX_DIGITS)
    return int(name) if is_number else number_of(name) % 10**MAX_DIGITS
