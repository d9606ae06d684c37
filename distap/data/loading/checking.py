"""Check a data set: one pass over the bytes of each shard compares all of them with the index.

It imports no torch.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import BinaryIO

import numpy as np

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.loading.reader import ImageSet
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import DataSet, Index, load_index
from distap.data.shards.indexing import Packed
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.shard_names import shard_names
from distap.errors import DistapError
from distap.randomness import Numbers
from distap.storage.files import Storage
from distap.storage.locations import LISTABLE, parse_source
from distap.storage.remotes import MissingFileError

BYTES_AT_ONCE = 2**20  # bytes between two images that are read at once


def check(source: DataSet, workers: int = 1, track: Track = untracked) -> Packed:
    """Read every byte of a data set's shards; return its index and all damage.

    The size and SHA-256 of each shard and the CRC-32 of each image are compared with the index, and
    the whole image is decoded. Reasons begin with shard_missing, shard_unreadable, shard_size,
    shard_sha256, shard_not_indexed, or that of a DamagedImageError.
    """
    source = parse_source(source)
    if source.kind in ("hf", "given"):
        raise DistapError(
            "data.no_files",
            f"{source}: there are no files of ours to check, such as shards or a folder of images",
        )
    index = load_index(source, compare=False)
    order = np.lexsort((index.offset, index.shard))
    counts = np.bincount(index.shard, minlength=len(index.shard_name))
    jobs = list(enumerate(np.split(order, np.cumsum(counts)[:-1])))
    check_shard = partial(_check_shard, ImageSet(source, index))
    damaged = list(chain(*map_in_processes(check_shard, jobs, workers, "checking shards", track)))
    if source.kind == "shards" and source.scheme in LISTABLE:
        with suppress(DistapError):  # not one shard is left, which is reported for each
            names = shard_names(source, Storage(source.base))
            reason = (
                "shard_not_indexed: the index does not have it, so its images are not read:"
                " `distap data index` reads it"
            )
            unknown = sorted(set(names) - set(index.shard_name.tolist()))
            damaged += [Skipped(name, reason) for name in unknown]
    return index, damaged


class _Pass:
    """One pass over a shard: the bytes of its images, and the SHA-256 of all bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._start = 0  # offset of the range that was read last
        self._last = b""

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end; offsets never fall.

        Ranges may overlap.
        """
        gap = offset - self._start - len(self._last)
        for place in range(0, gap, BYTES_AT_ONCE):
            self._taken(min(BYTES_AT_ONCE, gap - place))
        self._last = self._last[offset - self._start :]
        self._start = offset
        if len(self._last) < size:
            self._last += self._taken(size - len(self._last))
        return self._last[:size]

    def sha256(self) -> str:
        """Read to the end, and return the SHA-256 of the whole file."""
        while self._taken(BYTES_AT_ONCE):
            pass
        return self._digest.hexdigest()

    def _taken(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _check_shard(images: ImageSet, job: tuple[int, Numbers]) -> list[Skipped]:
    """Decode the images of a shard, and compare its bytes with the index.

    `job` is the number of the shard and those of its images, by their offset.
    """
    shard, samples = job
    storage = images.storage
    assert isinstance(storage, Storage)
    name = str(images.index.shard_name[shard])
    damaged = list[Skipped]()
    try:
        size = storage.size(name)
        if storage.disk is None and size:
            # A server that ignores Range may still send a whole shard.
            storage.read(name, size - 1, 1)
        with storage.open(name, size) as file:
            reading = _Pass(file)
            damaged.extend(_damaged_images(images, samples, reading))
            reason = _why_size_differs(images.index, shard, size) or _why_bytes_differ(
                images.index, shard, storage, reading, has_damage=bool(damaged)
            )
    except MissingFileError:
        reason = f"shard_missing: there is no such file; {len(samples)} images were in it"
    except DistapError as error:
        reason = (
            f"shard_unreadable: {error}; some of its {len(samples)} images could not be checked"
        )
    return [Skipped(name, reason), *damaged] if reason else damaged


def _damaged_images(images: ImageSet, samples: Numbers, reading: _Pass) -> Iterator[Skipped]:
    for sample in samples.tolist():
        where = images.where(sample)
        try:
            EncodedImage(_data(images, sample, reading), name=where).whole()
        except DamagedImageError as error:
            yield Skipped(where, str(error))


def _data(images: ImageSet, sample: int, reading: _Pass) -> bytes:
    """Return an image's bytes, or raise its damage as a DamagedImageError."""
    index = images.index
    if images.source.kind == "imagefolder":  # each file is one image
        return images.data(sample)
    data = reading.read(int(index.offset[sample]), int(index.size[sample]))
    damage = images.damage(sample, data)
    if damage is None:
        return data
    if damage.reason == "truncated":
        raise damage
    return images.data(sample)  # once more, since a network may have changed it on its way


def _why_size_differs(index: Index, shard: int, size: int) -> str:
    indexed_size = index.shard_size[shard]
    if size == indexed_size:
        return ""
    return f"shard_size: {size} bytes, but {indexed_size} when it was indexed"


def _why_bytes_differ(
    index: Index, shard: int, storage: Storage, reading: _Pass, has_damage: bool
) -> str:
    sha256 = index.shard_sha256[shard]
    if not sha256 or reading.sha256() == sha256:
        return ""
    name = str(index.shard_name[shard])
    if storage.disk is None:  # a network may have changed it on its way
        with storage.open(name) as file:
            if _Pass(file).sha256() == sha256:
                return ""
    changed = "no image, but the data around them, such as labels"
    if has_damage:
        changed = "images"
    return f"shard_sha256: it has changed since it was indexed: {changed}"
