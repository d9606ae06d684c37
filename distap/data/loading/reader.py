"""Open a data set and read its images by number, each by its offset in the shards.

It imports no torch.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.labels import Texts
from distap.data.map_style import DatasetRows, rows_behind
from distap.data.shards.index import DataSet, Index, index_of_folder, index_of_list, load_index
from distap.data.shards.parallel import Fetch
from distap.errors import DistapError
from distap.randomness import Numbers
from distap.storage.files import Storage
from distap.storage.locations import parse_source
from distap.storage.ranges import Range
from distap.storage.remotes import CONNECTIONS, UnreachableError

LISTS = (".csv", ".tsv")  # of images, as `distap data pack` reads them
HELD_BYTES = 2**28  # of images that a worker has read ahead
LOWER_HALF = np.uint64(2**32 - 1)  # of a checksum
ImageBytes = bytes | DamagedImageError  # an image's file, or why it cannot be used


class Shard(NamedTuple):
    """A file that holds images of a set, and what the index says of it."""

    storage: Storage
    name: str
    size: int  # bytes
    sha256: str


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

    def checksums(self, samples: Sequence[int]) -> NDArray[np.uint64]:
        """Return (n,) of each image's bytes: CRC-32 and, in the lower half, their number.

        Shards have them in their index; files are read. 0 stands for a file that cannot be read.
        """
        crc32 = self.index.crc32[samples].astype(np.uint64)
        sizes = self.index.size[samples].astype(np.uint64)
        if self.source.kind == "imagefolder":
            # Python lets other threads work while a file is read or its CRC-32 computed.
            with ThreadPoolExecutor() as pool:
                values = list(pool.map(self._checksum, samples))
            crc32 = np.array(values, np.uint64)
        # A CRC-32 alone is equal for one pair in 4 billion, and so rarely of files of one length.
        return np.where(crc32 > 0, (crc32 << np.uint64(32)) + (sizes & LOWER_HALF), np.uint64(0))

    def _checksum(self, sample: int) -> int:
        file = self._file_alone(sample)
        return 0 if isinstance(file, DamagedImageError) else zlib.crc32(file)

    def encoded(self, sample: int, file: ImageBytes | None = None) -> EncodedImage:
        """Return an image, not decoded yet; `file` is what `files` has read of it.

        Raises:
            DamagedImageError: its bytes have changed, or are no image.
        """
        if file is None:
            file = self.data(sample)
        if isinstance(file, DamagedImageError):
            raise file
        return EncodedImage(file, name=self.where(sample))

    def data(self, sample: int) -> bytes:
        """Return the image's encoded bytes, checked against the index."""
        [file] = self.files([sample])
        if isinstance(file, DamagedImageError):
            raise file
        return file

    def files(self, samples: Sequence[int], requests: int = CONNECTIONS) -> list[ImageBytes]:
        """Return the encoded bytes of each image, checked against the index, or how it is damaged.

        A store is asked for all of them at once, by up to `requests` requests.
        """
        if self.source.kind != "shards" or not isinstance(self.storage, Storage):
            return [self._file_alone(sample) for sample in samples]
        ranges = [self.range(sample) for sample in samples]
        files = self.storage.read_many(ranges, requests)
        return [self._checked(*read) for read in zip(samples, ranges, files, strict=True)]

    def fetching(self, files: Callable[[Any], Any], count: int, requests: int) -> Fetch | None:
        """Return how `files`, which reads `count` images, is called ahead of decoding them.

        A data set in Python is not read by several threads.
        """
        if isinstance(self.storage, DatasetRows):
            return None
        return Fetch(files, self.ahead(count, requests))

    def ahead(self, count: int, requests: int) -> int:
        """Return how often `count` images are read ahead of decoding them.

        A store is sent `requests` requests at a time in all, as far as memory suffices.
        """
        if not self.source.scheme:
            return 1
        held = max(1, HELD_BYTES // (count * int(self.index.size.mean() + 1)))
        return min(-(-requests // count), held)

    def drained(self) -> Counter[str]:
        """Return what reading has cost since the last call; see `Storage.meter`."""
        return self.storage.drained()

    @property
    def shards(self) -> int:
        """Return the number of shards, up to the last one with images; 1 if there are none."""
        return len(self.index.classes.spread)

    def shard(self, number: int) -> Shard:
        """Return a shard by its number."""
        index = self.index
        assert isinstance(self.storage, Storage)
        return Shard(
            self.storage,
            str(index.shard_name[number]),
            int(index.shard_size[number]),
            str(index.shard_sha256[number]),
        )

    def range(self, sample: int) -> Range:
        """Return where an image lies."""
        index = self.index
        shard = str(index.shard_name[index.shard[sample]])
        return Range(shard, int(index.offset[sample]), int(index.size[sample]))

    def _checked(self, sample: int, place: Range, data: bytes) -> ImageBytes:
        damage = self.damage(sample, data)
        if damage and self.source.scheme and isinstance(self.storage, Storage):
            # A network may have changed the bytes on their way: read them once more.
            self.storage.count(retries=1)
            data = self.storage.read(*place)
            damage = self.damage(sample, data)
        return damage or data

    def _file_alone(self, sample: int) -> ImageBytes:
        """Return the bytes of an image that is a file or a row of its own."""
        place = self.range(sample)
        try:
            return self._checked(sample, place, self.storage.read(*place))
        except DamagedImageError as error:
            return error
        except DistapError as error:
            # A file that is gone or may not be read is damage, unless the disk itself fails.
            if self.source.kind != "imagefolder" or isinstance(error, UnreachableError):
                raise
            return DamagedImageError("decode_error", str(error))

    def where(self, sample: int) -> str:
        """Return shard and name of a sample, for messages."""
        if isinstance(self.storage, DatasetRows):
            return self.storage.where(int(self.index.shard[sample]))
        shard = self.index.shard_name[self.index.shard[sample]]
        name = self.index.names[sample]
        return name if self.source.kind == "imagefolder" else f"{shard}:{name}"

    def damage(self, sample: int, data: bytes) -> DamagedImageError | None:
        """Return how the bytes of an image differ from the index, if they do."""
        size = int(self.index.size[sample])
        if len(data) < size:
            return DamagedImageError("truncated", f"{len(data)} bytes of {size}")
        if int(self.index.crc32[sample]) not in (0, zlib.crc32(data)):
            return DamagedImageError(
                "crc_mismatch", "the bytes have changed since they were indexed"
            )
        return None


def open_images(source: DataSet) -> ImageSet:
    """Open the images of shards, or of a local folder without index and shards, or of a list."""
    source = parse_source(source)
    folder = Path(source.base)
    is_named = source.pattern is not None or source.kind != "shards" or source.is_part
    holds_shards = Path(source.index).exists() or next(folder.glob("*.tar"), None) is not None
    if not (source.scheme or is_named or holds_shards) and folder.is_dir():
        return ImageSet(
            replace(source, kind="imagefolder"), index_of_folder(source, labelled=False)
        )
    if folder.suffix in LISTS and not (source.scheme or is_named) and folder.is_file():
        # Its images may lie anywhere, so their names in the index are whole paths.
        return ImageSet(replace(source, kind="imagefolder", base="/"), index_of_list(source))
    return ImageSet(source, load_index(source))


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
