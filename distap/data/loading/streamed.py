"""Streamed reading: shards from their first byte to their last, for pipes and for shards that have no index.

It promises the same as indexed reading, as long as a shard has the same bytes each time it is read: the global batch
of a step, its pixels and their order are a function of (shards, seed, step), no image is in a batch twice, and a run
that goes on neither loses nor repeats one. It differs from indexed reading:
- The number of ranks has to divide the number of streams.
- A batch holds what stands together in the shards, whatever its classes, so write the shards in a random order.
- The stream's next image takes the place of a damaged one and all others move up.
- Images have no checksums, and only the names of its shards identify a data set.
- The numbers of images and classes, the damage and the classes shared with validation are unknown before reading.
- A run that goes on reads the shards again that it was in the midst of.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.utils import identity

from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.loading.share import Chunk, Failure, Loaded, LoadingJob, ShareOfBatch, shares_of
from distap.data.loading.streams import Cursor, Members, Stream, StreamedShards, number_of
from distap.data.loading.workers import handed_over
from distap.data.sampling.random import RandomSampling
from distap.data.sampling.streams import StreamsSampling
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.tar import LABEL_FIELD, TarMember, labelled_image
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.storage.traffic import Traffic
from distap.world import World

KEY = "__key__"  # webdataset's name for the name of a sample


@dataclass(frozen=True)
class StreamedSource:
    """Read shard by shard, from the first byte to the last; needs no index, and `sampling: streams`.

    Args:
        label: member of a sample that holds its class, such as cls, txt or json; or __key__, the sample's own name.
            A whole number is the number of the class; any other text (but in cls) is the name of one.
        label_key: key of the class in a member that is JSON, with dots between the keys of nested objects.
        label_map: JSON file with an object that gives for each of these texts the number or name of its class.
    """

    label: str = LABEL_FIELD
    label_key: str | None = None
    label_map: Path | None = None

    def open(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> "StreamedImages":
        return StreamedImages(self, job, world, stopwatch)

    @cached_property
    def classes(self) -> dict[str, Any] | None:
        if self.label_map is None:
            return None
        try:
            classes = json.loads(self.label_map.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DistapError(f"data.reading.label_map: {self.label_map}: cannot be read: {error}") from error
        if not isinstance(classes, dict):
            expected = 'expected a JSON object such as {"cat": 0, "dog": 1}'
            raise DistapError(f"data.reading.label_map: {self.label_map}: {expected}")
        return classes

    def labelled(self, key: str, members: Members) -> Members:
        """The members of a sample with the number of its class in `cls`, as distap's own shards have it."""
        if self == StreamedSource():
            return members
        try:
            value: Any = key if self.label == KEY else members[self.label].data.decode().strip()
            if self.label_key is not None:
                value = json.loads(value)
                for part in self.label_key.split("."):
                    value = value[part]
            if self.classes is not None:
                value = self.classes[str(value)]
            return members | {LABEL_FIELD: TarMember("", 0, str(_class_number(value)).encode())}
        except (KeyError, TypeError, ValueError) as error:
            detail = f"key {key!r} has no class ({type(error).__name__}: {error})"
            raise DamagedImageError("missing_field", detail) from error


def _class_number(value: Any) -> int:
    """A whole number stands for itself; the name of a class gets a number of its own, the same in every run."""
    if isinstance(value, bool | float):
        raise TypeError(f"{value} is no class")
    if isinstance(value, str) and value and not value.isdigit():
        return number_of(value) % 10**18  # as many digits as a label may have
    return int(str(value))


class StreamedImages:
    """The images of streams, each of which belongs to one rank."""

    def __init__(self, source: StreamedSource, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        if not isinstance(job.sampling, StreamsSampling):
            raise DistapError("data.reading is streamed, in the order of shards: set sampling.name to streams")
        self._source, self._job, self._world, self._stopwatch = source, job, world, stopwatch
        source.classes  # noqa: B018 - read it now, to tell mistakes at once and to give each worker a copy
        self._sampling, self._shards = job.sampling, StreamedShards(job.source, job.remote)
        self._sampling.require(len(self._shards.names), world.size)
        if self.index is not None:
            RandomSampling(self._sampling.size).check(self.index.classes)
        if job.decode == "gpu":
            raise DistapError("data.decode is gpu, which needs indexed reading; set data.decode to cpu")
        if job.pixels.hold == "reread":
            raise DistapError("data.pixels.hold is reread, but streamed reading meets each image once; choose spool")
        self.size = self._sampling.size
        self.fingerprint, self.order = self._shards.fingerprint, 1
        self._cursors = [Cursor()] * len(world.slots(self._sampling.streams))

    @cached_property
    def index(self) -> Index | None:
        source = self._job.source
        if source.scheme == "pipe" and source.kept_index is None:
            return None
        try:
            return load_index(source, self._job.remote, compare=False)
        except DistapError:
            return None

    def shares(self, steps: range) -> Iterator[ShareOfBatch]:
        return shares_of(self._job, self._world, self._stopwatch, steps, lambda _: self._chunks(steps.start))

    def state_dict(self) -> dict[str, Tensor]:
        """`cursors`: (S, 3) int64, the position of each stream."""
        own = torch.tensor(self._cursors, dtype=torch.int64, device=self._world.device)
        return {"cursors": self._world.gather_rows(own, self._sampling.streams)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        cursors = state.get("cursors")
        if cursors is None or cursors.shape != (self._sampling.streams, len(Cursor._fields)) or cursors.min() < 0:
            raise DistapError("the checkpoint does not say where the streams of shards go on; choose another run")
        self._cursors = [Cursor(*row) for row in cursors[self._world.rank :: self._world.size].tolist()]

    def _chunks(self, first: int) -> Generator[Chunk]:
        """This rank's images from step `first` on, in the order of its slots.

        Row i of a rank with n streams comes from its stream i mod n. Of N workers, N a divisor of n, worker w has the
        streams and the rows w, w+N, w+2N, ..., so the chunks of all workers interleave to a chunk of the rank.
        """
        job, streams = self._job, len(self._cursors)
        workers = max((number for number in range(1, job.workers + 1) if streams % number == 0), default=0)
        images = StreamImages(self._source, job, self._shards, self._world.slots(self.size), self._cursors, first)
        # The chunks of a worker are smaller by the number of workers, so more of them are read ahead.
        options: dict[str, Any] = {"batch_size": None, "collate_fn": identity}
        handed = handed_over(images, workers, job.prefetch * workers, **job.handing_over, **options)
        try:
            while parts := list(islice(handed, max(workers, 1))):
                chunk = _interleaved(parts)
                self._cursors = [Cursor(*cursor) for cursor in chunk.cursors]
                yield chunk
        finally:
            handed.close()


@dataclass(frozen=True)
class StreamImages(IterableDataset[Chunk]):
    """A rank's images, without end; each loader worker has whole streams of it."""

    source: StreamedSource
    job: LoadingJob
    shards: StreamedShards
    slots: range  # of the rank
    cursors: list[Cursor]  # positions of its streams
    first: int  # step

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        slots, chunk = self.slots[number::workers], -(-self.job.chunk // workers)
        # The first slots of a rank have the numbers of its streams.
        own = list(zip(self.slots, self.cursors, strict=False))[number::workers]
        sampling, seed = self.job.sampling, self.job.seed
        assert isinstance(sampling, StreamsSampling)
        streams = [Stream(self.shards, sampling, seed, stream, cursor) for stream, cursor in own]
        for step in count(self.first):
            for stream in streams:
                stream.in_batch.clear()
            for start in range(0, len(slots), chunk):
                rows = range(start, min(start + chunk, len(slots)))
                loaded = [self._loaded(streams[row % len(streams)], step, slots[row]) for row in rows]
                pixels, images = zip(*loaded, strict=True)
                cursors: list[tuple[int, ...]] = [stream.cursor for stream in streams]
                yield Chunk(torch.stack(pixels), list(images), self.shards.meter.take(), cursors)

    def _loaded(self, stream: Stream, step: int, slot: int) -> tuple[Tensor, Loaded]:
        failures: list[Failure] = []
        for name, key, members in stream.candidates():
            try:
                label, image, _ = labelled_image(key, self.source.labelled(key, members))
                pixels = self.job.augmented(EncodedImage(image.data, self.job.max_pixels, name), step, slot)
            except DamagedImageError as error:
                failures.append(Failure.of(name, error))
            else:
                stream.in_batch.add(name)
                return pixels, Loaded(number_of(name), label, name, failures)
        raise AssertionError("candidates end with an error")


def _interleaved(parts: list[Chunk]) -> Chunk:
    """The chunks of all workers, which have equal numbers of rows and of streams, as one of the rank."""
    pixels, images, traffic, cursors, _ = zip(*parts, strict=True)
    return Chunk(
        torch.stack(pixels, 1).flatten(0, 1) if len(parts) > 1 else pixels[0],
        list(chain(*zip(*images, strict=True))),
        reduce(Traffic.plus, traffic),
        list(chain(*zip(*cursors, strict=True))),
    )
