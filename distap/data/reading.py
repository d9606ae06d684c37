"""Reading images by offset from a data set's shards."""

import os
import zlib
from pathlib import Path

from PIL import Image

from distap.data.decoding import MAX_PIXELS, DamagedImageError, EncodedImage
from distap.data.index import Index
from distap.errors import DistapError


class Reader:
    """Images of a data set, each by one positioned read; safe to copy into loader workers.

    Args:
        folder: of the shards.
        index: of the same data set.
        max_pixels: width times height that is refused without decoding when exceeded.
    """

    def __init__(self, folder: Path, index: Index, max_pixels: int = MAX_PIXELS) -> None:
        self.folder = folder
        self.index = index
        self.max_pixels = max_pixels
        self._files: dict[tuple[int, int], int] = {}  # by process and shard: a fork must not share its parent's

    def image(self, sample: int) -> Image.Image:
        """The decoded image, upright and RGB.

        Raises:
            DamagedImageError: its bytes are not those that were indexed, or cannot be decoded.
            DistapError: the shard cannot be read at all.
        """
        return self.encoded(sample).whole()

    def encoded(self, sample: int) -> EncodedImage:
        """The image before it is decoded; raises what `image` does."""
        return EncodedImage(self.data(sample), self.max_pixels)

    def data(self, sample: int) -> bytes:
        """The image's encoded bytes, checked against the index."""
        index = self.index
        size, shard = int(index.size[sample]), int(index.shard[sample])
        try:
            data = _read(self._file(shard), size, int(index.offset[sample]))
        except OSError as error:
            raise DistapError(f"{self.folder / str(index.shard_name[shard])}: cannot be read: {error}") from error
        if len(data) < size:
            raise DamagedImageError("truncated", f"{len(data)} bytes of {size}")
        if zlib.crc32(data) != int(index.crc32[sample]):
            raise DamagedImageError("crc_mismatch", "the bytes have changed since they were indexed")
        return data

    def where(self, sample: int) -> str:
        """Shard and key of a sample, for messages."""
        return f"{self.index.shard_name[self.index.shard[sample]]}:{self.index.key[sample]}"

    def _file(self, shard: int) -> int:
        process = os.getpid()
        if (process, shard) not in self._files:
            path = self.folder / str(self.index.shard_name[shard])
            self._files[process, shard] = os.open(path, os.O_RDONLY)
        return self._files[process, shard]


def _read(file: int, size: int, offset: int) -> bytes:
    """`size` bytes from `offset`, fewer only at the end of the file."""
    parts = []
    while size > 0 and (part := os.pread(file, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
