"""Check a data set: every byte of its shards against the index, and every image by decoding it."""

import hashlib
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import DamagedImageError, OutOfMemoryError
from distap.data.loading.reader import Reader
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.errors import DistapError
from distap.storage.files import Storage, storage_of
from distap.storage.locations import LISTABLE, Source, parse_source, shard_names
from distap.storage.remotes import MissingFileError, RemoteSettings


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


def check(
    source: Source | Path | str, workers: int = 1, track: Track = untracked, remote: RemoteSettings | None = None
) -> tuple[Index, list[Damage]]:
    """Read every byte of a data set's shards; return its index and all damage, which never ends the check.

    The size and SHA-256 of each shard and the CRC-32 of each image are compared with the index, and the whole image
    is decoded.
    """
    source = parse_source(source)
    if source.kind in ("hf", "given"):
        raise DistapError(f"{source}: there are no files of ours to check; `distap data pack` makes some of a folder")
    settings = remote or RemoteSettings()
    index = load_index(source, settings, compare=False)
    order = np.lexsort((index.offset, index.shard))
    jobs = list(enumerate(np.split(order, np.cumsum(index.shard_counts)[:-1])))
    check_shard = partial(_check_shard, Reader(source, index, remote=settings))
    damaged = list(chain(*map_in_processes(check_shard, jobs, workers, "checking shards", track)))
    if source.kind == "shards" and source.scheme in LISTABLE:
        with suppress(DistapError):  # not one shard is left, which is said of each
            unknown = set(shard_names(source, storage_of(source.base, settings))) - set(index.shard_name.tolist())
            detail = "the index does not have it, so its images are not read: `distap data index` reads it"
            damaged += [Damage(name, "", "shard_not_indexed", detail) for name in sorted(unknown)]
    return index, damaged


def same_bytes(index: Index) -> NDArray[np.int64]:
    """Return (n, 2) pairs of samples with the same image size in bytes and CRC-32.

    Not all are equal: PNG files hold checksums of their own, so theirs meet a few times in 10,000 images.
    """
    order = np.lexsort((index.label, index.size, index.crc32))
    first, second = order[:-1], order[1:]
    same = (index.crc32[first] == index.crc32[second]) & (index.size[first] == index.size[second])
    return np.stack([first, second], axis=1)[same & (index.crc32[first] != 0)]


def _check_shard(reader: Reader, job: tuple[int, NDArray[np.int64]]) -> list[Damage]:
    """Decode the images of a shard, given by their numbers, and compare its bytes with the index."""
    shard, samples = job
    index, storage, damaged = reader.index, reader.storage, list[Damage]()
    assert isinstance(storage, Storage)
    name, size, sha256 = (column[shard].item() for column in (index.shard_name, index.shard_size, index.shard_sha256))
    reason = detail = ""
    try:
        found = storage.about(name).size
        for sample in samples.tolist():
            try:
                reader.encoded(sample).whole()
            except DamagedImageError as error:
                told = str(error).removeprefix(f"{error.reason}: ")
                damaged.append(Damage(name, str(index.names[sample]), error.reason, told))
        if found != size:
            reason, detail = "shard_size", f"{found} bytes, but {size} when it was indexed"
        elif sha256:
            with storage.open(name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:  # type: ignore[arg-type]
                    what = "images" if damaged else "no image, but the data around them, such as labels"
                    reason, detail = "shard_sha256", f"it has changed since it was indexed: {what}"
    except MissingFileError:
        reason, detail = "shard_missing", f"there is no such file; {len(samples)} images were in it"
    except OutOfMemoryError:
        raise
    except DistapError as error:
        reason, detail = "shard_unreadable", f"{error}; some of its {len(samples)} images could not be checked"
    return [Damage(name, "", reason, detail), *damaged] if reason else damaged
