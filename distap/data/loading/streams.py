"""Streams of streamed reading: each walks its shards with webdataset's pipeline.

distap's strict tar reader replaces webdataset's, which loses samples without a word: at a changed bit in a header, or
a cut at a block's end.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from itertools import count

import webdataset

from distap.data.shards.tar import Group, TarMember, read_groups
from distap.errors import DistapError
from distap.randomness import permutation, seed_for
from distap.storage.files import storage_of
from distap.storage.locations import Source, shard_names
from distap.storage.remotes import RemoteSettings

SHARD_ORDER, SHUFFLE = 18, 19  # first words of random keys; no two uses share one

Members = dict[str, TarMember]  # the files of a sample by their endings
Found = tuple[str, str, Members]  # shard and key of a sample, its key alone, its members


def number_of(name: str) -> int:
    """Hash a name to 63 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=8).digest()) >> 1


class StreamedShards:
    """Read shards from first to last byte; safe to copy into loader workers."""

    def __init__(self, source: Source, remote: RemoteSettings | None = None) -> None:
        self.source = source
        self._storage = storage_of(source.base, remote)
        self.meter = self._storage.meter
        self.names = shard_names(source, self._storage)

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' names, since their contents are unknown before reading."""
        return hashlib.sha256("\0".join(self.names).encode(errors="backslashreplace")).hexdigest()

    def samples(self, shard: int, shuffle: int, seed: int) -> Iterator[Group]:
        """Yield key and members of a shard's samples, shuffled through webdataset's buffer of `shuffle` samples."""
        shuffled = webdataset.shuffle(shuffle, initial=shuffle, rng=random.Random(seed))
        return iter(webdataset.DataPipeline([[shard], self._groups, shuffled]))

    def _groups(self, shards: Iterable[int]) -> Iterator[Group]:
        """A stage of webdataset's pipeline, in place of url_opener, tar_file_expander and group_by_keys."""
        for shard in shards:
            name = self.names[shard]
            length = self._storage.about(name).size
            with self._storage.open(name) as file:
                yield from read_groups(file, length, self._storage.where(name))


class Stream:
    """Samples of one stream; `own` are the numbers of its shards, `number` identifies the stream."""

    def __init__(self, shards: StreamedShards, own: range, number: int, seed: int, shuffle: int, first: int) -> None:
        self.shards, self.own = shards, own
        self._key, self._shuffle = (seed, number), shuffle
        self._walked = self._walk(first)
        self._step, self._in_batch = -1, set[str]()  # names of the images of a step that were used

    def candidates(self, step: int) -> Iterator[Found]:
        """Yield further samples that the batch does not hold yet; stop after the first that can be used.

        At the seam of two passes an image may come up again within a batch, as its own positive: it is left out.
        """
        if step != self._step:
            self._step, self._in_batch = step, set()
        ends = 0  # of passes; between two of them lies a whole one
        while ends < 2:
            sample = next(self._walked)
            if sample is None:
                ends += 1
            elif sample[0] not in self._in_batch:
                self._in_batch.add(sample[0])
                yield sample
        raise DistapError(
            f"{self.shards.source}: a loader worker has only {len(self._in_batch)} images in its {len(self.own)} "
            "shards, too few for its part of a batch, in which no image may be twice, or too many of them damaged: "
            "set sampling.batch_size or data.workers lower"
        )

    def _walk(self, first: int) -> Iterator[Found | None]:
        """Yield each sample of each pass from number `first` on, and None at the end of a pass; without end."""
        for turn in count(first):
            for place in permutation(len(self.own), SHARD_ORDER, *self._key, turn).tolist():
                shard = self.own[place]
                name, seed = self.shards.names[shard], seed_for(SHUFFLE, self._key[0], turn, shard)
                for key, members in self.shards.samples(shard, self._shuffle, seed):
                    yield f"{name}:{key}", key, members
            yield None
