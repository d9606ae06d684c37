"""Streamed reading: shards from their first byte to their last, for pipes and for shards that have no index.

What it promises, as indexed reading does, as long as a shard has the same bytes each time it is read:
- The global batch of a step, its augmented pixels and the order of its slots are a function of (shards, seed, step),
  never of ranks, loader workers or where a run was interrupted.
- No image is twice in a batch. A run that goes on neither loses nor repeats an image.
- A damaged tar, a cut one and a failed command are errors that name the shard and the place. A damaged image is
  counted by its reason and named.

What indexed reading promises and this does not:
- Any number of ranks: here it has to divide the number of streams.
- Batches by class: here they hold what stands together in the shards, mixed within blocks. So shards are to be
  written in a random order, and a class of few images may have one alone in a batch, without a positive.
- A stand-in of the same class, in one slot: here the stream's next image takes the place of a damaged one and all
  that follow move up, so that what is damaged changes the later batches of its stream.
- That bytes are those that were indexed: here there are no checksums of images, and the names of the shards alone
  tell one data set from another.
- Knowledge before reading: here nobody knows how many images and classes there are, what is damaged, or whether the
  classes of the validation set are unseen.
- A quick start: here blocks of images are read before the first is given, and a run that goes on reads again what it
  was in the midst of, up to a shard and a block of each stream.
"""

import hashlib
from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from distap.data.images.decoding import MAX_PIXELS, EncodedImage
from distap.data.images.transforms import Transform
from distap.data.loading.indexed import Chunk, Failure, Loaded, ShareOfBatch, augmented, chunk_of, shares_of
from distap.data.loading.pixels import held_pixels
from distap.data.loading.streams import Cursor, SequentialShards, Stream, StreamedImage
from distap.data.loading.training import LoaderSettings
from distap.data.loading.workers import handed_over
from distap.data.sampling.streams import StreamsSampling
from distap.data.shards.index import Index, load_index
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.storage.remotes import RemoteSettings
from distap.world import World

T = TypeVar("T")


class StreamedChunk(NamedTuple):
    """Some images of some streams, and where these go on where the images end a step."""

    images: Chunk
    cursors: list[Cursor] | None


class StreamImages(IterableDataset[StreamedChunk | None]):
    """This rank's images of some steps; each loader worker has whole streams of the rank.

    Args:
        shards: of the data set.
        sampling, seed: of the training.
        transform: makes pixels of an image.
        max_pixels: width times height that is refused without decoding when exceeded.
        slots: of this rank in a global batch.
        cursors: where each stream of the rank goes on.
        steps: to read.
        chunk: images that a worker hands over at once.
    """

    def __init__(
        self,
        shards: SequentialShards,
        sampling: StreamsSampling,
        seed: int,
        transform: Transform,
        max_pixels: int,
        slots: range,
        cursors: list[Cursor],
        steps: range,
        chunk: int,
    ) -> None:
        self.shards, self.sampling, self.seed = shards, sampling, seed
        self.transform, self.max_pixels = transform, max_pixels
        self.slots, self.cursors, self.steps, self.chunk = slots, cursors, steps, chunk

    def __iter__(self) -> Iterator[StreamedChunk | None]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        slots = self.slots[number::count]
        # The first slots of a rank are those of its streams, whose numbers they are.
        own = list(zip(self.slots, self.cursors, strict=False))[number::count]
        streams = [Stream(self.shards, self.sampling, self.seed, stream, cursor) for stream, cursor in own]
        for step in self.steps:
            for stream in streams:
                stream.begin_batch()
            for start in range(0, len(slots), self.chunk):
                stop = min(start + self.chunk, len(slots))
                images = [self._loaded(streams[row % len(streams)], step, slots[row]) for row in range(start, stop)]
                cursors = [stream.cursor for stream in streams] if stop == len(slots) else None
                yield StreamedChunk(chunk_of(images, self.shards.take_traffic()), cursors)
        yield from repeat(None)  # a worker that ended before the others would be taken for a lost one

    def _loaded(self, stream: Stream, step: int, slot: int) -> Loaded:
        def pixels_of(image: StreamedImage) -> Tensor:
            encoded = EncodedImage(image.data, self.max_pixels, image.name)
            return augmented(self.transform, encoded, self.seed, step, slot)

        failures: list[Failure] = []
        image, pixels = stream.give(pixels_of, failures)
        return Loaded(pixels, _number(image.name), image.label, image.name, failures)


class StreamedImages:
    """The images of a training that is read in streams, as one rank sees them.

    Args:
        shards: of the data set.
        sampling, seed: of the training.
        world: the ranks.
        transform: makes pixels of an image.
        size: width and height of the pixels.
        settings: how they are read.
        stopwatch: counts the waiting as `data_wait`.
        max_pixels: width times height that is refused without decoding when exceeded.
        remote: how the index is reached, if there is one.
    Raises:
        DistapError: there are too few shards, the ranks cannot own whole streams, or pixels were to be read twice.
    """

    def __init__(
        self,
        shards: SequentialShards,
        sampling: StreamsSampling,
        seed: int,
        world: World,
        transform: Transform,
        size: int,
        settings: LoaderSettings,
        stopwatch: Stopwatch,
        max_pixels: int = MAX_PIXELS,
        remote: RemoteSettings | None = None,
    ) -> None:
        sampling.require_shards(len(shards.names))
        sampling.require_ranks(world.size)
        if settings.pixels.hold == "reread":
            raise DistapError(
                "data.pixels.hold is reread, but streamed reading comes by each image once; expected auto, memory or "
                "spool"
            )
        self.size = sampling.size
        self.fingerprint = shards.fingerprint
        self._shards, self._sampling, self._seed, self._world = shards, sampling, seed, world
        self._transform, self._pixels, self._max_pixels = transform, size, max_pixels
        self._settings, self._stopwatch, self._remote = settings, stopwatch, remote
        self._cursors = [Cursor()] * len(world.slots(sampling.streams))

    @cached_property
    def index(self) -> Index | None:
        """Of the data set, where there is one after all."""
        source = self._shards.source
        if source.scheme == "pipe" and source.kept_index is None:
            return None
        try:
            return load_index(source, self._remote, compare=False)
        except DistapError:
            return None

    def shares(self, steps: range) -> Iterator[ShareOfBatch]:
        """This rank's share of the global batch of each step."""
        settings = self._settings
        slots = self._world.slots(self.size)
        held = held_pixels(settings.pixels, len(slots), self._pixels, settings.pinned)
        return shares_of(self._chunks(slots, steps), steps, self.size, held, self._stopwatch)

    def state_dict(self) -> dict[str, Tensor]:
        """`cursors`: (S, 5) int64, where each stream goes on after the images that were handed over."""
        own = torch.tensor(self._cursors, dtype=torch.int64, device=self._world.device)
        return {"cursors": self._world.gather_rows(own, self._sampling.streams)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, on any number of ranks.

        Raises:
            DistapError: it is the state of a run that was read otherwise.
        """
        cursors = state.get("cursors")
        if cursors is None or cursors.shape != (self._sampling.streams, len(Cursor._fields)) or cursors.min() < 0:
            raise DistapError(
                "the checkpoint does not say where the streams of shards go on; choose another run folder"
            )
        self._cursors = [Cursor(*row) for row in cursors[self._world.rank :: self._world.size].tolist()]

    def _chunks(self, slots: range, steps: range) -> Generator[Chunk, None, None]:
        """The rank's images in the order of its slots."""
        settings = self._settings
        streams = len(self._cursors)
        workers = max((count for count in range(1, settings.workers + 1) if streams % count == 0), default=0)
        together = max(workers, 1)
        chunk = -(-settings.chunk // together)
        images = StreamImages(
            self._shards,
            self._sampling,
            self._seed,
            self._transform,
            self._max_pixels,
            slots,
            self._cursors,
            steps,
            chunk,
        )
        # Chunks are smaller by the number of workers, which make one of the rank's together.
        prefetch = settings.prefetch * workers
        handed = handed_over(images, workers, prefetch, batch_size=None, collate_fn=_as_it_is)
        try:
            for _ in range(len(steps) * -(-len(slots) // (together * chunk))):
                parts = list(islice(handed, together))
                if parts[0].cursors is not None:
                    self._cursors = _interleaved([part.cursors for part in parts])
                yield _merged([part.images for part in parts])
        finally:
            handed.close()


def _merged(parts: list[Chunk]) -> Chunk:
    """The chunks of all workers, row by row: worker w has the rows w, w + N, w + 2N, ..."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].pixels
    pixels = first.new_empty(sum(len(part.pixels) for part in parts), *first.shape[1:])
    traffic = parts[0].traffic
    for worker, part in enumerate(parts):
        pixels[worker :: len(parts)] = part.pixels
        if worker:
            traffic = traffic.plus(part.traffic)
    samples, labels, names = (
        _interleaved([getattr(part, field) for part in parts]) for field in ("samples", "labels", "names")
    )
    return Chunk(pixels, samples, labels, names, list(chain(*(part.failures for part in parts))), traffic)


def _interleaved(lists: list[list[T]]) -> list[T]:
    """First elements first: lists have equal lengths."""
    return [element for row in zip(*lists, strict=True) for element in row]


def _number(name: str) -> int:
    """What an image is known by among those of all shards, in 63 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=8).digest()) >> 1


def _as_it_is(chunk: Any) -> Any:
    return chunk
