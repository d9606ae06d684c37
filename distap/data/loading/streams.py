"""The images of shards in the order in which they stand there, from any place on."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from distap.data.images.decoding import DamagedImageError
from distap.data.loading.indexed import Failure
from distap.data.loading.pipes import piped
from distap.data.sampling.streams import StreamsSampling, block_order, shard_order, too_short
from distap.data.shards.samples import Group, labelled_image, read_groups
from distap.errors import DistapError
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, shard_urls
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Meter, Traffic


class SequentialShards:
    """Shards of a source that are read from their first byte to their last; safe to copy into loader workers.

    Args:
        source: of the shards, `pipe:` commands among them.
        remote: how a remote source is reached, and how often reading is tried.
    Raises:
        DistapError: there are no shards, or their pattern is wrong.
    """

    def __init__(self, source: Source, remote: RemoteSettings | None = None) -> None:
        self.source = source
        self._storage: Storage | None = None if source.scheme == "pipe" else storage_of(source.base, remote)
        self._meter = Meter() if self._storage is None else self._storage.meter
        urls = shard_urls(source, self._storage)
        self.names = urls if self._storage is None else [url[len(source.base.rstrip("/")) + 1 :] for url in urls]

    @property
    def fingerprint(self) -> str:
        """A hash of the list of shards: what they hold is not known before they have been read."""
        return hashlib.sha256("\0".join(self.names).encode(errors="backslashreplace")).hexdigest()

    def groups(self, shard: int) -> Iterator[Group]:
        """The samples of a shard, in order, read strictly.

        Raises:
            DamagedShardError: it is damaged.
            DistapError: it cannot be read.
        """
        name = self.names[shard]
        if self._storage is None:
            with piped(name.removeprefix("pipe:"), self._meter) as pipe:
                yield from read_groups(pipe, None, name)
            return
        length = self._storage.about(name).size
        with self._storage.open(name) as file:
            yield from read_groups(file, length, self._storage.where(name))

    def take_traffic(self) -> Traffic:
        """What reading took in this process since this was last called."""
        return self._meter.take()


class Cursor(NamedTuple):
    """Where a stream goes on: a place in a block of images, and where in the shards that block begins."""

    block: int = 0
    place: int = 0  # images of the block that are done with
    turn: int = 0  # passes over all shards before the block
    shard: int = 0  # shards of the pass before the block
    sample: int = 0  # samples of the shard before the block


class StreamedImage(NamedTuple):
    """An image that is not decoded yet."""

    identity: tuple[int, int]  # shard, and number in the shard
    name: str  # shard and key
    label: int
    data: bytes
    left_out: tuple[Failure, ...]  # what stands before it in the shards and cannot be used


class Stream:
    """One of the streams of a data set, see `StreamsSampling`.

    Args:
        shards: of the data set.
        sampling, seed: of the training.
        number: of the stream.
        cursor: where it goes on.
    """

    def __init__(
        self, shards: SequentialShards, sampling: StreamsSampling, seed: int, number: int, cursor: Cursor
    ) -> None:
        self._shards, self._sampling, self._seed, self._number = shards, sampling, seed, number
        self._own = range(number, len(shards.names), sampling.streams)
        self._begin = cursor._replace(place=0)
        self._after = self._begin  # what has been read of the shards
        self._to_skip = cursor.place
        self._block: deque[StreamedImage] = deque()
        self._in_shards = self._walk(cursor)
        self._in_batch: set[tuple[int, int]] = set()  # images that the present batch has
        self._usable: int | None = None  # images of a whole pass, once it is known

    @property
    def cursor(self) -> Cursor:
        """Where the stream goes on after what it has given."""
        if not self._block and not self._to_skip:
            return self._after
        return self._begin._replace(place=self._to_skip or self._sampling.shuffle - len(self._block))

    def begin_batch(self) -> None:
        """Give what may be given once in the next batch."""
        self._in_batch.clear()

    def give(
        self, decode: Callable[[StreamedImage], Tensor], failures: list[Failure]
    ) -> tuple[StreamedImage, Tensor]:
        """The next image that is not in the batch yet, and what `decode` makes of it.

        Args:
            decode: raises DamagedImageError where an image is to be left out.
            failures: the images that were left out are added to it.
        Raises:
            DistapError: a shard is damaged or cannot be read, or the stream has nothing more for this batch.
        """
        passed_over = 0
        # So many in a row hold every image of the stream, however blocks are mixed.
        while self._usable is None or passed_over <= self._usable + 2 * self._sampling.shuffle:
            image = self._next()
            failures += image.left_out
            if image.identity not in self._in_batch:
                try:
                    pixels = decode(image)
                except DamagedImageError as error:
                    failures.append(Failure(image.name, error.reason))
                else:
                    self._in_batch.add(image.identity)
                    return image, pixels
            passed_over += 1
        raise self._too_short(len(self._in_batch))

    def _next(self) -> StreamedImage:
        while not self._block:
            self._fill()
        return self._block.popleft()

    def _fill(self) -> None:
        """Read the next block, and leave out what was given of it before."""
        size = self._sampling.shuffle
        self._begin = self._after
        images = list(islice(self._in_shards, size))
        order = block_order(size, self._seed, self._number, self._begin.block)
        self._block.extend(images[place] for place in order[self._to_skip :])
        self._after = self._after._replace(block=self._begin.block + 1)
        self._to_skip = 0

    def _walk(self, cursor: Cursor) -> Iterator[StreamedImage]:
        """Shard after shard, pass after pass, without end."""
        turn, first, skip = cursor.turn, cursor.shard, cursor.sample
        left_out: list[Failure] = []
        while True:
            usable, is_whole = 0, (first, skip) == (0, 0)
            order = shard_order(len(self._own), self._seed, self._number, turn)
            for place in range(first, len(order)):
                shard, sample = self._own[order[place]], -1
                for sample, (key, members) in enumerate(self._shards.groups(shard)):
                    if sample < skip:
                        continue
                    self._after = self._after._replace(turn=turn, shard=place, sample=sample + 1)
                    name = f"{self._shards.names[shard]}:{key}"
                    try:
                        label, image, _ = labelled_image(key, members)
                    except DamagedImageError as error:
                        left_out.append(Failure(name, error.reason))
                    else:
                        usable += 1
                        yield StreamedImage((shard, sample), name, label, image.data, tuple(left_out))
                        left_out.clear()
                if sample + 1 < skip:
                    raise DistapError(
                        f"{self._shards.names[shard]}: it has {sample + 1} samples, but the run was behind {skip} of "
                        "them; data must not change during a training"
                    )
                skip = 0
            if is_whole:
                if usable == 0:
                    raise self._too_short(0)
                self._usable = usable
            turn, first, skip = turn + 1, 0, 0

    def _too_short(self, images: int) -> DistapError:
        return DistapError(f"{self._shards.source}: {too_short(self._number, images, self._sampling)}")
