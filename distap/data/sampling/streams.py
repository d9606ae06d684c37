"""Batches of consecutive images of shards: the order that streamed reading can keep to."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples
from distap.errors import DistapError
from distap.randomness import permutation

SHARDS, BLOCK = 18, 19  # first words of the keys that orders of shards, and within blocks, are drawn with


@dataclass(frozen=True)
class StreamsSampling:
    """A fixed number of streams of images, each of which gives the same share of every batch.

    Stream s has the shards s, s+S, s+2S, ... and walks them again and again, in a new random order each pass; a
    shard's images come in the order of the tar. Of that sequence, each `shuffle` images in a row are given out in a
    random order. Where two passes meet, an image that the batch has already is passed over. The class of an image
    plays no part: shards are to be written in a random order (`distap data pack --shuffle`).

    Slot s of a batch belongs to stream s mod S, so a rank of W that holds the slots r, r+W, ... holds whole streams
    where W divides S.

    Args:
        batch_size: B, images of a global batch, a multiple of S.
        streams: S, at most as many as there are shards.
        shuffle: images of a stream that are mixed; streamed reading holds them in memory, as files. 1 mixes none.
    """

    name: Literal["streams"] = "streams"
    batch_size: int = 4096
    streams: int = 16
    shuffle: int = 128

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.batch_size < 2 or self.streams < 1 or self.shuffle < 1:
            raise ValueError(
                f"expected a batch_size of at least 2, streams and shuffle of at least 1, not {self.batch_size}, "
                f"{self.streams} and {self.shuffle}"
            )
        if self.batch_size % self.streams:
            raise ValueError(
                f"batch_size is {self.batch_size}, of which each of {self.streams} streams cannot give the same "
                f"share; expected {_multiples(self.batch_size, self.streams)}"
            )

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.batch_size

    @property
    def share(self) -> int:
        """Images that each stream gives of a batch."""
        return self.batch_size // self.streams

    def require_shards(self, count: int) -> None:
        """Refuse a data set with a stream that has no shard."""
        if count < self.streams:
            raise DistapError(
                f"sampling.streams is {self.streams}, but the data set has only {count} shards, and a stream needs "
                f"one at least: set it to {count} or less, or pack with a smaller --images-per-shard"
            )

    def require_ranks(self, count: int) -> None:
        """Refuse a number of ranks that cannot own whole streams, the same number each."""
        if self.streams % count:
            ranks = ", ".join(str(number) for number in range(1, self.streams + 1) if self.streams % number == 0)
            raise DistapError(
                f"sampling.streams is {self.streams}, of which {count} ranks cannot own the same number: run on one "
                f"of {ranks} ranks; or, for a new run, set it to {_multiples(self.streams, count)}"
            )

    def check(self, classes: Classes) -> None:
        """Refuse a data set with a stream too short for its share of a batch."""
        if classes.shard_counts is None:
            raise DistapError("sampling by streams needs to know how many images each shard has")
        self.require_shards(len(classes.shard_counts))
        for stream in range(self.streams):
            images = int(classes.shard_counts[stream :: self.streams].sum())
            if images < self.share:
                raise DistapError(too_short(stream, images, self))

    def steps_per_epoch(self, classes: Classes) -> int:
        """Steps until every image had its turn, in the longest stream."""
        assert classes.shard_counts is not None
        longest = max(int(classes.shard_counts[stream :: self.streams].sum()) for stream in range(self.streams))
        return -(-longest // self.share)

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, slot s from stream s mod S."""
        batch = np.empty(self.batch_size, dtype=np.int64)
        for number, walk in enumerate(_walks(self, classes, seed)):
            batch[number :: self.streams] = walk.share(step)
        return batch


def shard_order(count: int, seed: int, stream: int, turn: int) -> list[int]:
    """The order in which a stream walks its `count` shards in its pass number `turn`."""
    order: list[int] = permutation(count, SHARDS, seed, stream, turn).tolist()
    return order


def block_order(size: int, seed: int, stream: int, block: int) -> list[int]:
    """The order in which a stream gives out the images of a block."""
    order: list[int] = permutation(size, BLOCK, seed, stream, block).tolist()
    return order


def too_short(stream: int, images: int, sampling: StreamsSampling) -> str:
    """What to say of a stream that cannot fill its share."""
    return (
        f"stream {stream} of {sampling.streams} has only {images} usable images, but gives {sampling.share} to a "
        "batch, and no image may be in a batch twice: set sampling.batch_size lower, or sampling.streams"
    )


def _multiples(number: int, of: int) -> str:
    """The nearest multiples of `of`, for messages."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


class _Walk:
    """A stream whose shards have known sizes, all of them sound.

    Args:
        sampling, seed: of the training.
        stream: its number.
        firsts, sizes: first sample and number of samples of each of its shards.
    """

    def __init__(
        self,
        sampling: StreamsSampling,
        seed: int,
        stream: int,
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        self._share, self._shuffle = sampling.share, sampling.shuffle
        self._seed, self._stream = seed, stream
        self._firsts, self._sizes = firsts, sizes
        self._images = int(sizes.sum())
        self._known = (0, 0)  # a step, and the place at which it begins
        self._turns: dict[int, Samples] = {}  # samples in the order of a pass

    def share(self, step: int) -> Samples:
        """(b,) samples of a step."""
        return self._from(self._begin(step))[0]

    def _begin(self, step: int) -> int:
        """Place of the sequence at which a step begins: that of those before, and of what they passed over."""
        done, place = self._known if self._known[0] <= step else (0, 0)
        while done < step:
            steps = min(self._steps_within_turn(place), step - done)
            if steps > 0:
                done, place = done + steps, place + steps * self._share
            else:
                done, place = done + 1, self._from(place)[1]
        self._known = done, place
        return place

    def _steps_within_turn(self, place: int) -> int:
        """Steps from here on whose blocks all lie within one pass, which has no image twice."""
        turn = place // self._shuffle * self._shuffle // self._images
        end = (turn + 1) * self._images // self._shuffle * self._shuffle
        return max(end - place, 0) // self._share

    def _from(self, place: int) -> tuple[Samples, int]:
        """The next share from a place of the sequence on, none twice; and the place after it."""
        ahead = self._share
        while True:
            samples = self._sequence(place, place + ahead)
            firsts = np.sort(np.unique(samples, return_index=True)[1])
            if len(firsts) >= self._share:
                chosen = firsts[: self._share]
                return samples[chosen], place + int(chosen[-1]) + 1
            ahead += self._share

    def _sequence(self, start: int, stop: int) -> Samples:
        """Samples in the order in which they are given out, those passed over among them."""
        size = self._shuffle
        blocks = range(start // size, -(-stop // size))
        orders = (np.array(block_order(size, self._seed, self._stream, block)) + block * size for block in blocks)
        places = np.concatenate(list(orders))[start - blocks[0] * size : stop - blocks[0] * size]
        turns, within = np.divmod(places, self._images)
        samples = np.empty(len(places), dtype=np.int64)
        for turn in np.unique(turns).tolist():
            samples[turns == turn] = self._turn(turn)[within[turns == turn]]
        self._turns = {turn: samples for turn, samples in self._turns.items() if turn >= turns.min()}
        return samples

    def _turn(self, turn: int) -> Samples:
        if turn not in self._turns:
            order = shard_order(len(self._sizes), self._seed, self._stream, turn)
            shards = [np.arange(size) + first for first, size in zip(self._firsts, self._sizes, strict=True)]
            self._turns[turn] = np.concatenate([shards[shard] for shard in order])
        return self._turns[turn]


@lru_cache(maxsize=2)
def _walks(sampling: StreamsSampling, classes: Classes, seed: int) -> list[_Walk]:
    sizes = classes.shard_counts
    assert sizes is not None
    firsts = np.cumsum(sizes) - sizes
    return [
        _Walk(sampling, seed, stream, firsts[stream :: sampling.streams], sizes[stream :: sampling.streams])
        for stream in range(sampling.streams)
    ]
