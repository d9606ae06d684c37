"""Open a data set, read its images by number, each by its offset in the shards, and check all.

It imports no torch.
"""

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.labels import Texts
from distap.data.map_style import DatasetRows, rows_behind
from distap.data.plan import Numbers
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import DataSet, Index, index_of_folder, load_index
from distap.data.shards.indexing import Packed
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.shard_names import shard_names
from distap.errors import DistapError
from distap.storage.files import Storage
from distap.storage.locations import LISTABLE, parse_source
from distap.storage.remotes import MissingFileError, UnreachableError


class ImageSet:
    """N images with an index, each read by its place in a shard.

    It is safe to copy into loader workers.
    """

    def __init__(self, source: DataSet, index: Index) -> None:
        self.source = parse_source(source)
        self.index = index
        self.name = str(self.source)  # as it was given
        self.storage: Storage | DatasetRows = rows_behind(self.source) or Storage(self.source.base)

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def keys(self) -> Texts:
        """Return (N,) the name of each image, unlike all others."""
        names = self.index.names
        if len(np.unique(names)) == len(names):
            return names
        # Each shard of other makers may count from 0.
        shards = self.index.shard_name[self.index.shard]
        return np.char.add(np.char.add(shards, ":"), self.index.key)

    @cached_property
    def classes(self) -> Texts:
        """Return (N,) the name of each image's class, "" for none."""
        return self.index.class_name[self.index.label]

    def encoded(self, sample: int) -> EncodedImage:
        """Return an image's file, not decoded yet.

        Raises:
            DamagedImageError: its bytes have changed, or are no image.
        """
        return EncodedImage(self.data(sample), name=self.where(sample))

    def data(self, sample: int) -> bytes:
        """Return the image's encoded bytes, checked against the index."""
        index = self.index
        shard = str(index.shard_name[index.shard[sample]])
        read = partial(self.storage.read, shard, int(index.offset[sample]), int(index.size[sample]))
        try:
            data = read()
        except DistapError as error:
            # A file that is gone or may not be read is damage, unless the disk itself fails.
            if self.source.kind != "imagefolder" or isinstance(error, UnreachableError):
                raise
            raise DamagedImageError("decode_error", str(error)) from error
        if self.source.scheme and self._damage(sample, data):
            # A network may have changed the bytes on their way: read them once more.
            self.storage.meter["retries"] += 1
            data = read()
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


def open_images(source: DataSet) -> ImageSet:
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


def same_bytes(index: Index) -> Numbers:
    """Return (n, 2) pairs of samples with the same image size in bytes and CRC-32.

    Not all are equal: PNG files hold checksums of their own, so their CRC-32 agree a few times in
    10,000 images.
    """
    # Equal files become neighbours, those of one class next to each other, so comparing neighbours
    # suffices.
    order = np.lexsort((index.label, index.size, index.crc32))
    first = order[:-1]
    second = order[1:]
    same = (index.crc32[first] == index.crc32[second]) & (index.size[first] == index.size[second])
    return np.stack([first, second], axis=1)[same & (index.crc32[first] != 0)]


def _check_shard(images: ImageSet, job: tuple[int, Numbers]) -> list[Skipped]:
    """Decode the images of a shard, and compare its bytes with the index.

    `job` is the number of the shard and those of its images.
    """
    shard, samples = job
    storage = images.storage
    assert isinstance(storage, Storage)
    name = str(images.index.shard_name[shard])
    damaged = list[Skipped]()
    try:
        size = storage.size(name)
        damaged.extend(_damaged_images(images, samples))
        reason = _why_shard_differs(images.index, shard, storage, size, has_damage=bool(damaged))
    except MissingFileError:
        reason = f"shard_missing: there is no such file; {len(samples)} images were in it"
    except DistapError as error:
        reason = (
            f"shard_unreadable: {error}; some of its {len(samples)} images could not be checked"
        )
    return [Skipped(name, reason), *damaged] if reason else damaged


def _damaged_images(images: ImageSet, samples: Numbers) -> Iterator[Skipped]:
    for sample in samples.tolist():
        try:
            images.encoded(sample).whole()
        except DamagedImageError as error:
            yield Skipped(images.where(sample), str(error))


def _why_shard_differs(
    index: Index, shard: int, storage: Storage, size: int, has_damage: bool
) -> str:
    """Return how a shard of `size` bytes differs from the index; "" if it does not."""
    indexed_size = index.shard_size[shard]
    if size != indexed_size:
        return f"shard_size: {size} bytes, but {indexed_size} when it was indexed"
    sha256 = index.shard_sha256[shard]
    if sha256:
        with storage.open(str(index.shard_name[shard])) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:  # type: ignore[arg-type]
                changed = "no image, but the data around them, such as labels"
                if has_damage:
                    changed = "images"
                return f"shard_sha256: it has changed since it was indexed: {changed}"
    return ""
