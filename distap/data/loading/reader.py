"""Open a data set, read its images by number, each by its offset in the shards, and check all; no
torch here.
"""

import hashlib
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.map_style import DatasetRows, rows_behind
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index, index_of_folder, load_index
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.shard_names import shard_names
from distap.errors import DistapError
from distap.storage.files import Storage
from distap.storage.locations import LISTABLE, Source, parse_source
from distap.storage.remotes import MissingFileError, UnreachableError


class ImageSet:
    """N images with an index, each read by its place in a shard; safe to copy into loader
    workers."""

    def __init__(self, source: Source | Path | str, index: Index) -> None:
        self.source = parse_source(source)
        self.index = index
        self.name = str(self.source)  # as it was given
        self.storage: Storage | DatasetRows = rows_behind(self.source) or Storage(self.source.base)

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def keys(self) -> NDArray[np.str_]:
        """Return (N,) the name of each image, unlike all others."""
        names = self.index.names
        if len(np.unique(names)) == len(names):
            return names
        # each shard of other makers may count from 0
        shards = self.index.shard_name[self.index.shard].tolist()
        return np.array(
            [f"{shard}:{key}" for shard, key in zip(shards, self.index.key.tolist(), strict=True)]
        )

    @cached_property
    def classes(self) -> NDArray[np.str_]:
        """Return (N,) the name of each image's class, "" for none."""
        return self.index.class_name[self.index.label]

    def encoded(self, sample: int) -> EncodedImage:
        """Return an image's file, not decoded yet; raise DamagedImageError if its bytes changed or
        are no image.
        """
        return EncodedImage(self.data(sample), name=self.where(sample))

    def data(self, sample: int) -> bytes:
        """Return the image's encoded bytes, checked against the index."""
        shard, offset, size = (
            int(of[sample]) for of in (self.index.shard, self.index.offset, self.index.size)
        )
        try:
            data = self.storage.read(str(self.index.shard_name[shard]), offset, size)
        except (
            DistapError
        ) as error:  # a file that is gone or may not be read, unless the disk itself fails
            if self.source.kind != "imagefolder" or isinstance(error, UnreachableError):
                raise
            raise DamagedImageError("decode_error", str(error)) from error
        if self._damage(sample, data) and self.source.scheme:
            # A network may have changed the bytes on their way: read them once more.
            self.storage.meter["retries"] += 1
            data = self.storage.read(str(self.index.shard_name[shard]), offset, size)
        damage = self._damage(sample, data)
        if damage:
            raise damage
        return data

    def where(self, sample: int) -> str:
        """Return shard and name of a sample, for messages."""
        if isinstance(self.storage, DatasetRows):
            return self.storage.where(int(self.index.shard[sample]))
        shard = self.index.shard_name[self.index.shard[sample]]
        name = self.index.names[sample]
        return name if self.source.kind == "imagefolder" else f"{shard}:{name}"

    def _damage(self, sample: int, data: bytes) -> DamagedImageError | None:
        size = int(self.index.size[sample])
        if len(data) < size:
            return DamagedImageError("truncated", f"{len(data)} bytes of {size}")
        if int(self.index.crc32[sample]) not in (0, zlib.crc32(data)):
            return DamagedImageError(
                "crc_mismatch", "the bytes have changed since they were indexed"
            )
        return None


def open_images(source: Source | Path | str) -> ImageSet:
    """Open the images of shards, or of a local folder without index and shards."""
    source = parse_source(source)
    folder = Path(source.base)
    is_named = source.pattern is not None or source.kind != "shards" or source.is_part
    holds_shards = Path(source.index).exists() or next(folder.glob("*.tar"), None) is not None
    if not (source.scheme or is_named or holds_shards) and folder.is_dir():
        return ImageSet(
            replace(source, kind="imagefolder"), index_of_folder(source, labelled=False)
        )
    return ImageSet(source, load_index(source))


def check(
    source: Source | Path | str, workers: int = 1, track: Track = untracked
) -> tuple[Index, list[Skipped]]:
    """Read every byte of a data set's shards; return its index and all damage, which never ends the
    check.

    The size and SHA-256 of each shard and the CRC-32 of each image are compared with the index, and
    the whole image is decoded. Reasons begin with shard_missing, shard_unreadable, shard_size,
    shard_sha256, shard_not_indexed, or that of a DamagedImageError.
    """
    source = parse_source(source)
    if source.kind in ("hf", "given"):
        raise DistapError(
            f"{source}: there are no files of ours to check, such as shards or a folder of images"
        )
    index = load_index(source, compare=False)
    order = np.lexsort((index.offset, index.shard))
    counts = np.bincount(index.shard, minlength=len(index.shard_name))
    jobs = list(enumerate(np.split(order, np.cumsum(counts)[:-1])))
    check_shard = partial(_check_shard, ImageSet(source, index))
    damaged = list(chain(*map_in_processes(check_shard, jobs, workers, "checking shards", track)))
    if source.kind == "shards" and source.scheme in LISTABLE:
        with suppress(DistapError):  # not one shard is left, which is said of each
            unknown = set(shard_names(source, Storage(source.base))) - set(
                index.shard_name.tolist()
            )
            detail = (
                "the index does not have it, so its images are not read: `distap data index`"
                " reads it"
            )
            damaged += [Skipped(name, f"shard_not_indexed: {detail}") for name in sorted(unknown)]
    return index, damaged


def same_bytes(index: Index) -> NDArray[np.int64]:
    """Return (n, 2) pairs of samples with the same image size in bytes and CRC-32.

    Not all are equal: PNG files hold checksums of their own, so theirs meet a few times in 10,000
    images.
    """
    # Equal files become neighbours, those of one class next to each other, so comparing neighbours
    # suffices.
    order = np.lexsort((index.label, index.size, index.crc32))
    first = order[:-1]
    second = order[1:]
    same = (index.crc32[first] == index.crc32[second]) & (index.size[first] == index.size[second])
    return np.stack([first, second], axis=1)[same & (index.crc32[first] != 0)]


def _check_shard(images: ImageSet, job: tuple[int, NDArray[np.int64]]) -> list[Skipped]:
    """Decode the images of a shard, given by their numbers, and compare its bytes with the
    index."""
    shard, samples = job
    index = images.index
    storage = images.storage
    damaged = list[Skipped]()
    assert isinstance(storage, Storage)
    name, size, sha256 = (
        column[shard].item() for column in (index.shard_name, index.shard_size, index.shard_sha256)
    )
    reason = detail = ""
    try:
        found = storage.size(name)
        for sample in samples.tolist():
            try:
                images.encoded(sample).whole()
            except DamagedImageError as error:
                damaged.append(Skipped(images.where(sample), str(error)))
        if found != size:
            reason = "shard_size"
            detail = f"{found} bytes, but {size} when it was indexed"
        elif sha256:
            with storage.open(name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:  # type: ignore[arg-type]
                    what = (
                        "images"
                        if damaged
                        else "no image, but the data around them, such as labels"
                    )
                    reason = "shard_sha256"
                    detail = f"it has changed since it was indexed: {what}"
    except MissingFileError:
        reason = "shard_missing"
        detail = f"there is no such file; {len(samples)} images were in it"
    except DistapError as error:
        reason = "shard_unreadable"
        detail = f"{error}; some of its {len(samples)} images could not be checked"
    return [Skipped(name, f"{reason}: {detail}"), *damaged] if reason else damaged
