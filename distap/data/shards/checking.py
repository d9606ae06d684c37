"""Checking a data set: every byte of its shards against the index, and every image by decoding it."""

import csv
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, OutOfMemoryError, Reason, decode
from distap.data.shards.index import Index, load_index
from distap.data.shards.parallel import spread
from distap.data.shards.progress import Track, untracked
from distap.data.shards.scanning import read_samples
from distap.data.shards.tar import DamagedShardError
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.locations import Source, parse_source
from distap.storage.reads import Storage, storage_of
from distap.storage.remotes import MissingFileError, RemoteSettings

PIECE = 2**20  # bytes that are passed over at once between images

ShardReason = Literal["shard_missing", "shard_unreadable", "shard_size", "shard_sha256"]


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was indexed, or an image that cannot be decoded."""

    shard: str
    key: str  # "" where it is about the shard as a whole
    reason: Reason | ShardReason
    detail: str

    @property
    def where(self) -> str:
        """shard:key, or the shard."""
        return f"{self.shard}:{self.key}" if self.key else self.shard


@dataclass(frozen=True)
class Checked:
    """What was found in a data set."""

    images: int
    shards: int
    damaged: tuple[Damage, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many there are of each reason, most first."""
        return dict(Counter(str(damage.reason) for damage in self.damaged).most_common())


def check(
    source: Source | Path | str,
    workers: int = 1,
    track: Track = untracked,
    remote: RemoteSettings | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Checked:
    """Read every byte of a data set's shards once; damage is listed, and never ends the check.

    A shard's size and SHA-256 are compared with the index, and each image's CRC-32; then it is decoded, upright and
    RGB, as in training, but in full, where training decodes no more than its crop needs.

    Args:
        source: where the shards are, with their index.
        workers: processes that read shards.
        track: wraps a loop to show its progress.
        remote: how a remote source is reached.
        max_pixels: width times height that counts as damage when exceeded.
    Raises:
        DistapError: there is no data set, or its index cannot be read.
    """
    source = parse_source(source)
    settings = remote or RemoteSettings()
    index = load_index(source, settings, compare=False)
    jobs = list(_jobs(source, settings, index, max_pixels))
    with spread(_check_shard, jobs, workers) as results:
        found = list(track(results, "checking shards", len(jobs)))
    return Checked(len(index), len(jobs), tuple(damage for shard in found for damage in shard))


def write_damage(path: Path, damaged: tuple[Damage, ...]) -> None:
    """Write a CSV of shard,key,reason,detail, whole or not at all.

    Raises:
        DistapError: it cannot be written.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["shard", "key", "reason", "detail"])
    rows.writerows([damage.shard, damage.key, damage.reason, damage.detail] for damage in damaged)
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


@dataclass(frozen=True)
class _Job:
    """A shard to check against its rows of the index, in the order of their offsets."""

    base: str
    name: str
    remote: RemoteSettings
    size: int
    sha256: str
    key: NDArray[np.str_]
    offset: NDArray[np.int64]
    bytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    max_pixels: int


def _jobs(source: Source, remote: RemoteSettings, index: Index, max_pixels: int) -> Iterator[_Job]:
    order = np.lexsort((index.offset, index.shard))
    ends = np.cumsum(np.bincount(index.shard, minlength=len(index.shard_name)))
    start = 0
    for number, end in enumerate(ends.tolist()):
        rows, start = order[start:end], end
        yield _Job(
            base=source.base,
            name=str(index.shard_name[number]),
            remote=remote,
            size=int(index.shard_size[number]),
            sha256=str(index.shard_sha256[number]),
            key=index.key[rows],
            offset=index.offset[rows],
            bytes=index.size[rows],
            crc32=index.crc32[rows],
            max_pixels=max_pixels,
        )


def _check_shard(job: _Job) -> list[Damage]:
    damaged: list[Damage] = []
    storage = storage_of(job.base, job.remote)
    try:
        size = storage.about(job.name).size
        with storage.open(job.name) as file:
            passed = _Passed(file)
            damaged.extend(_damaged_images(job, passed, storage))
            passed.to_end()
        if size != job.size:
            detail = f"{size} bytes, but {job.size} when it was indexed"
            damaged.insert(0, Damage(job.name, "", "shard_size", detail))
        elif passed.digest.hexdigest() != job.sha256:
            detail = f"it has changed since it was indexed: {_change(job, storage, bool(damaged))}"
            damaged.insert(0, Damage(job.name, "", "shard_sha256", detail))
    except MissingFileError:
        detail = f"there is no such file; {len(job.key)} images were in it"
        damaged.insert(0, Damage(job.name, "", "shard_missing", detail))
    except OutOfMemoryError:
        raise
    except DistapError as error:
        detail = f"{error}; of its {len(job.key)} images not all could be looked at"
        damaged.insert(0, Damage(job.name, "", "shard_unreadable", detail))
    return damaged


def _damaged_images(job: _Job, passed: "_Passed", storage: Storage) -> Iterator[Damage]:
    rows = (column.tolist() for column in (job.key, job.offset, job.bytes, job.crc32))
    for key, offset, size, crc32 in zip(*rows, strict=True):
        # Two rows of an index may share bytes; those that have passed are read again.
        data = passed.read(offset, size) if offset >= passed.position else storage.read(job.name, offset, size)
        try:
            if len(data) < size:
                raise DamagedImageError("truncated", f"{len(data)} bytes of {size}")
            if zlib.crc32(data) != crc32:
                raise DamagedImageError("crc_mismatch", "the bytes have changed since they were indexed")
            decode(data, job.max_pixels, f"{job.name}:{key}")
        except DamagedImageError as error:
            yield Damage(job.name, key, error.reason, str(error).removeprefix(f"{error.reason}: "))


def _change(job: _Job, storage: Storage, in_images: bool) -> str:
    """What has changed in a shard, in words."""
    try:
        with storage.open(job.name) as file:
            for _ in read_samples(file, job.size, job.name, []):
                pass
    except DamagedShardError as error:
        return str(error).removeprefix(f"{job.name}: ")
    return "images" if in_images else "no image, but what is around them, such as labels"


class _Passed:
    """A file that is read once from its first byte to its last, and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.position = 0
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, which is not before the position; fewer only at the end of the file."""
        while self.position < offset and self._next(min(offset - self.position, PIECE)):
            pass
        return self._next(size) if self.position == offset else b""

    def to_end(self) -> None:
        """Pass over the rest."""
        while self._next(PIECE):
            pass

    def _next(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        self.position += len(data)
        return data
