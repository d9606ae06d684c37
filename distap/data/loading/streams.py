"""The streams of streamed reading: each walks its shards in webdataset's pipeline, from any position on.

distap replaces webdataset's opener and tar expander, which lose samples without a word (at a changed bit in a tar
header, a cut at a block's end, a command that fails); ours retry what may pass and then raise.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import webdataset

from distap.data.loading.pipes import piped
from distap.data.sampling.streams import StreamsSampling
from distap.data.shards.tar import Group, TarMember, read_groups
from distap.errors import DistapError
from distap.randomness import permutation, seed_for
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, shard_names
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Meter

SHARDS, SHUFFLE = 18, 19  # first words of random keys; no two uses share one

Members = dict[str, TarMember]  # the files of a sample by their endings
Found = tuple[str, str, Members]  # shard and key of a sample, its key alone, its members


def number_of(name: str) -> int:
    """A number of 63 bits for a name, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=8).digest()) >> 1


class StreamedShards:
    """Shards that are read from their first byte to their last; safe to copy into loader workers."""

    def __init__(self, source: Source, remote: RemoteSettings | None = None) -> None:
        self.source = source
        self._storage: Storage | None = None if source.scheme == "pipe" else storage_of(source.base, remote)
        self.meter = Meter() if self._storage is None else self._storage.meter
        self.names = shard_names(source, self._storage)

    @property
    def fingerprint(self) -> str:
        """A hash of the shards' names: what they hold is not known before they have been read."""
        return hashlib.sha256("\0".join(self.names).encode(errors="backslashreplace")).hexdigest()

    def samples(self, shard: int, shuffle: int, seed: int) -> Iterator[Group]:
        """The samples of a shard, key and members, shuffled by webdataset through a buffer of `shuffle` samples."""
        shuffled = webdataset.shuffle(shuffle, initial=shuffle, rng=random.Random(seed))
        return iter(webdataset.DataPipeline([[shard], self._groups, shuffled]))

    def _groups(self, shards: Iterable[int]) -> Iterator[Group]:
        """A stage of the pipeline, in place of webdataset's url_opener, tar_file_expander and group_by_keys."""
        for shard in shards:
            name = self.names[shard]
            if self._storage is None:
                with piped(name.removeprefix("pipe:"), self.meter) as pipe:
                    yield from read_groups(pipe, None, name)
            else:
                length = self._storage.about(name).size
                with self._storage.open(name) as file:
                    yield from read_groups(file, length, self._storage.where(name))


class Cursor(NamedTuple):
    turn: int = 0  # passes over all of its shards that are done
    place: int = 0  # shards of the pass that are done
    sample: int = 0  # samples of the shard, in its shuffled order, that are done


@dataclass(eq=False)
class Stream:
    """One of the streams of a data set, see `StreamsSampling`."""

    shards: StreamedShards
    sampling: StreamsSampling
    seed: int
    number: int
    cursor: Cursor  # where it goes on, and later the place behind the sample that was given last
    in_batch: set[str] = field(default_factory=set)  # names of the present batch's images; others fill and clear it

    def __post_init__(self) -> None:
        self._walked = self._walk(self.cursor)

    def candidates(self) -> Iterator[Found]:
        """The next samples that the batch has not got yet, to be tried until one can be used."""
        ends = 0  # of passes; between two of them lies a whole one
        while ends < 2:
            self.cursor, sample = next(self._walked)
            if sample is None:
                ends += 1
            elif sample[0] not in self.in_batch:
                yield sample
        sampling, images = self.sampling, len(self.in_batch)
        raise DistapError(
            f"{self.shards.source}: stream {self.number} of {sampling.streams} has only {images} usable images, "
            f"but gives {sampling.size // sampling.streams} to a batch, and no image may be in a batch twice: set "
            "sampling.batch_size lower, or sampling.streams"
        )

    def _walk(self, cursor: Cursor) -> Iterator[tuple[Cursor, Found | None]]:
        """Endlessly, pass after pass: each sample, and None at the end of a pass, with the cursor behind it."""
        first, begin, skip = cursor
        names, streams = self.shards.names, self.sampling.streams
        own = range(self.number, len(names), streams)
        for turn in count(first):
            order = permutation(len(own), SHARDS, self.seed, self.number, turn).tolist()
            for place in range(begin, len(own)):
                shard, number = own[order[place]], 0
                seed = seed_for(SHUFFLE, self.seed, turn, shard)
                for number, (key, members) in enumerate(self.shards.samples(shard, self.sampling.shuffle, seed), 1):
                    if number > skip:
                        yield Cursor(turn, place, number), (f"{names[shard]}:{key}", key, members)
                if number < skip:
                    raise DistapError(
                        f"{names[shard]}: data must not change during a training: it has {number} samples, but the "
                        f"run had already used {skip} of them"
                    )
                skip = 0
            begin = 0
            yield Cursor(turn + 1), None
