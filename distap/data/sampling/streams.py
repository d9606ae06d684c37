"""Batches of images that streamed reading meets one after the other."""

from dataclasses import dataclass

from distap.data.plan import Classes, Samples
from distap.errors import DistapError


@dataclass(frozen=True)
class StreamsSampling:
    """Divide the shards among a fixed number of streams, each of which gives the same share of every batch.

    Stream s reads the shards s, s+S, s+2S, ... again and again, in a new random order each pass, and shuffles the
    images of a shard. If an image comes up again within one batch, at the seam of two passes, it is left out there.
    Classes play no part, so write the shards in a random order (`distap data pack --shuffle`).

    Slot s of a batch belongs to stream s mod S, so each of W ranks, which holds the slots r, r+W, ..., owns whole
    streams if W divides S.
    """

    batch_size: int = 4096  # B, images of a global batch, a multiple of S
    streams: int = 16  # S, at most the number of shards
    # Images of a shard that are held in memory, as files, to draw the next from; 1 keeps their order.
    shuffle: int = 128

    def __post_init__(self) -> None:
        if self.batch_size < 2 or self.streams < 1 or self.shuffle < 1:
            given = f"{self.batch_size}, {self.streams} and {self.shuffle}"
            raise ValueError(f"expected a batch_size of at least 2, streams and shuffle of at least 1, not {given}")
        if self.batch_size % self.streams:
            unequal = f"which {self.streams} streams cannot share equally"
            fitting = _multiples(self.batch_size, self.streams)
            raise ValueError(f"batch_size is {self.batch_size}, {unequal}; expected {fitting}")

    @property
    def size(self) -> int:
        return self.batch_size

    def require(self, shards: int, ranks: int) -> None:
        """Raise DistapError if a stream has no shard, or ranks cannot own whole streams."""
        if shards < self.streams:
            problem = f"the data set has only {shards} shards, and a stream needs one"
            remedy = f"set it to {shards} or less, or pack with a smaller --images-per-shard"
            raise DistapError(f"sampling.streams is {self.streams}, but {problem}: {remedy}")
        if self.streams % ranks:
            fitting = ", ".join(str(count) for count in range(1, self.streams + 1) if self.streams % count == 0)
            raise DistapError(
                f"sampling.streams is {self.streams}, of which {ranks} ranks cannot own the same number: run on one "
                f"of {fitting} ranks; or, for a new run, set it to {_multiples(self.streams, ranks)}"
            )

    def check(self, data: Classes) -> None:
        remedy = "set data.reading to streamed, or choose random"
        raise DistapError(f"sampling by streams is the order of streamed reading: {remedy}")

    def batch(self, data: Classes, seed: int, step: int) -> Samples:
        raise NotImplementedError("streamed reading decides batch by batch what is in them")


def _multiples(number: int, of: int) -> str:
    """The nearest multiples of `of`, for messages."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
