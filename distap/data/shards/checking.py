"""Check a data set: every byte of its shards against the index, and every image by decoding it."""

import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import DamagedImageError, OutOfMemoryError, decode
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.errors import DistapError
from distap.storage.files import Storage, storage_of
from distap.storage.hashing import Hashed
from distap.storage.locations import LISTABLE, Source, parse_source, shard_names
from distap.storage.remotes import MissingFileError, RemoteSettings

PIECE = 2**20  # bytes that are read at once between images


class Damage(NamedTuple):
    """A shard or image that differs from the index, or an image that cannot be decoded."""

    shard: str
    key: str  # its name in the index; "" for the shard as a whole
    # shard_missing, shard_unreadable, shard_size, shard_sha256, shard_not_indexed, or that of a DamagedImageError
    reason: str
    detail: str

    @property
    def where(self) -> str:
        return self.shard if self.key in ("", self.shard) else f"{self.shard}:{self.key}"


class _Job(NamedTuple):
    name: str
    size: int
    sha256: str  # "" is unknown
    images: list[tuple[str, int, int, int]]  # name, offset, size, CRC-32 (0: unknown), by offset


def check(
    source: Source | Path | str, workers: int = 1, track: Track = untracked, remote: RemoteSettings | None = None
) -> tuple[Index, list[Damage]]:
    """Read every byte of a data set's shards once; return its index and all damage, which never ends the check.

    The size and SHA-256 of each shard and the CRC-32 of each image are compared with the index, and the whole image
    is decoded.
    """
    source = parse_source(source)
    if source.kind in ("hf", "given"):
        raise DistapError(f"{source}: there are no files of ours to check; `distap data pack` makes some of a folder")
    settings = remote or RemoteSettings()
    index = load_index(source, settings, compare=False)
    jobs = list(_jobs(index))
    found = map_in_processes(partial(_check_shard, source.base, settings), jobs, workers, "checking shards", track)
    return index, [damage for shard in found for damage in shard] + _not_indexed(source, settings, index)


def _not_indexed(source: Source, remote: RemoteSettings, index: Index) -> list[Damage]:
    """Return shards in the data set's folder that its index lacks, so that nothing reads their images."""
    if source.kind != "shards" or source.scheme not in LISTABLE:
        return []
    try:
        there = set(shard_names(source, storage_of(source.base, remote)))
    except DistapError:  # not one shard is left, which is said of each
        return []
    unknown = sorted(there - set(index.shard_name.tolist()))
    detail = "the index does not have it, so its images are not read: `distap data index` reads it"
    return [Damage(name, "", "shard_not_indexed", detail) for name in unknown]


def same_bytes(index: Index) -> NDArray[np.int64]:
    """Return (n, 2) pairs of samples with the same image size in bytes and CRC-32.

    Not all are equal: PNG files hold checksums of their own, so theirs meet a few times in 10,000 images.
    """
    order = np.lexsort((index.label, index.size, index.crc32))
    first, second = order[:-1], order[1:]
    same = (index.crc32[first] == index.crc32[second]) & (index.size[first] == index.size[second])
    return np.stack([first, second], axis=1)[same & (index.crc32[first] != 0)]


def _jobs(index: Index) -> Iterator[_Job]:
    order = np.lexsort((index.offset, index.shard))
    columns = [column[order].tolist() for column in (index.names, index.offset, index.size, index.crc32)]
    images = zip(*columns, strict=True)
    shards = (index.shard_name, index.shard_size, index.shard_sha256, index.shard_counts)
    for name, size, sha256, count in zip(*(column.tolist() for column in shards), strict=True):
        yield _Job(name, size, sha256, list(islice(images, count)))


def _check_shard(base: str, remote: RemoteSettings, job: _Job) -> list[Damage]:
    damaged: list[Damage] = []
    storage = storage_of(base, remote)
    reason = detail = ""
    try:
        size = storage.about(job.name).size
        with storage.open(job.name) as file:
            hashed = Hashed(file)
            damaged.extend(_damaged_images(job, hashed, storage))
            while hashed.read(PIECE):
                pass
        if size != job.size:
            reason, detail = "shard_size", f"{size} bytes, but {job.size} when it was indexed"
        elif job.sha256 and hashed.sha256 != job.sha256:
            what = "images" if damaged else "no image, but the data around them, such as labels"
            reason, detail = "shard_sha256", f"it has changed since it was indexed: {what}"
    except MissingFileError:
        reason, detail = "shard_missing", f"there is no such file; {len(job.images)} images were in it"
    except OutOfMemoryError:
        raise
    except DistapError as error:
        reason, detail = "shard_unreadable", f"{error}; some of its {len(job.images)} images could not be checked"
    return [Damage(job.name, "", reason, detail), *damaged] if reason else damaged


def _damaged_images(job: _Job, hashed: Hashed, storage: Storage) -> Iterator[Damage]:
    for key, offset, size, crc32 in job.images:
        if offset < hashed.position:  # two rows of an index may share bytes: read them again
            data = storage.read(job.name, offset, size)
        else:
            while hashed.position < offset and hashed.read(min(offset - hashed.position, PIECE)):
                pass
            data = hashed.read(size)  # empty at the end of a file that was cut short
        try:
            if len(data) < size:
                raise DamagedImageError("truncated", f"{len(data)} bytes of {size}")
            if crc32 not in (0, zlib.crc32(data)):
                raise DamagedImageError("crc_mismatch", "the bytes have changed since they were indexed")
            decode(data, name=f"{job.name}:{key}")
        except DamagedImageError as error:
            yield Damage(job.name, key, error.reason, str(error).removeprefix(f"{error.reason}: "))
