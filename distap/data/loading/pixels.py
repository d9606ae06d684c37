"""Hold the pixels of a rank's images between describe and replay: in memory, in a spool file, or nowhere.

Pixels wait as uint8, as the loader gave them, and come back byte for byte in each of the three ways.
"""

import errno
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from distap.data.settings import PixelSettings
from distap.errors import DistapError

FULL = (errno.ENOSPC, errno.EDQUOT)


def held_pixels(settings: PixelSettings, count: int, size: int, pinned: bool) -> "PixelsInMemory | Spool | None":
    """Room for the pixels of `count` images of size x size; None if they are to be read again.

    If `pinned`, rows come back in page-locked memory, from which a GPU copies without waiting.
    """
    way = settings.way(3 * count * size * size)
    if way == "memory":
        return PixelsInMemory(count, size, pinned)
    if way == "spool":
        return Spool(count, size, settings.spool_folder or Path(tempfile.gettempdir()), pinned)
    return None


class PixelsInMemory:
    spool_size_bytes = spool_limit_bytes = 0

    def __init__(self, count: int, size: int, pinned: bool) -> None:
        self._pixels = torch.empty(count, 3, size, size, dtype=torch.uint8, pin_memory=pinned)

    def keep(self, start: int, pixels: Tensor) -> Tensor:
        """Take the next rows, which begin with `start`, and return them as the network is to get them."""
        return self._pixels[start : start + len(pixels)].copy_(pixels)

    def rows(self, rows: slice | Tensor) -> Tensor:
        """(n, 3, size, size) uint8 of rows that were kept, valid until the next are asked for."""
        return self._pixels[rows]

    def blank(self, rows: list[int]) -> None:
        """Make these rows black."""
        self._pixels[rows] = 0


class Spool:
    """Pixels that wait in a file without a name, whose space is reserved before the first row is written."""

    def __init__(self, count: int, size: int, folder: Path, pinned: bool) -> None:
        self._folder, self._shape, self._pinned = folder, (3, size, size), pinned
        self._row_bytes = 3 * size * size
        self.spool_size_bytes = count * self._row_bytes
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed with this object
        except OSError as error:
            raise DistapError(f"data.pixels.spool_folder: {folder}: no spool file can be made: {error}") from error
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        with self._told():  # ask first: a reservation that fails may have filled the disk for a moment
            if self._free_bytes() < self.spool_size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file, 0, self.spool_size_bytes)

    @property
    def spool_limit_bytes(self) -> int:
        """The file's own size, and what its file system has left."""
        return self.spool_size_bytes + self._free_bytes()

    def keep(self, start: int, pixels: Tensor) -> Tensor:
        self._transfer(os.pwritev, start, pixels.contiguous())
        return pixels

    def rows(self, rows: slice | Tensor) -> Tensor:
        numbers = _numbers(rows)
        # New memory each time: a copy to the GPU may still read the rows handed out last.
        pixels = torch.empty(len(numbers), *self._shape, dtype=torch.uint8, pin_memory=self._pinned)
        for place, row in enumerate(numbers):
            self._transfer(os.preadv, row, pixels[place])
        return pixels

    def blank(self, rows: list[int]) -> None:
        for row in rows:
            self.keep(row, torch.zeros(1, *self._shape, dtype=torch.uint8))

    def _transfer(self, move: Callable[[int, list[memoryview], int], int], row: int, pixels: Tensor) -> None:
        data, offset = pixels.numpy().data.cast("B"), row * self._row_bytes
        with self._told():
            while data:
                moved = move(self._file, [data], offset)
                if moved == 0:
                    raise OSError("it has become shorter; nothing else may write to it")
                data, offset = data[moved:], offset + moved

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._file).free

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise errors of the file system as DistapErrors that say what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise DistapError(f"{self._folder}: the spool file cannot be used: {error}") from error
            raise DistapError(
                f"{self._folder}: too little space for pixels: this rank's spool file takes {self.spool_size_bytes} "
                f"bytes, {self._free_bytes()} are free; each rank of the host has one. Make room, set another "
                "data.pixels.spool_folder, set data.pixels.hold to reread, or spread the batch over more hosts"
            ) from error


class Reread:
    """Pixels that are not kept: each image is read, decoded and augmented again, once and in order.

    `again` reads the next rows, any number at once; `name` gives the shard and key of a row. Only checksums are kept,
    so that no image that has changed meanwhile trains the network.
    """

    spool_size_bytes = spool_limit_bytes = 0

    def __init__(self, again: Callable[[], Tensor], name: Callable[[int], str]) -> None:
        self._again, self._name = again, name
        self._checksums: list[int] = []
        self._blank: set[int] = set()
        self._done = 0  # rows read again
        self._waiting: dict[int, Tensor] = {}  # rows read again that may still be asked for

    def keep(self, start: int, pixels: Tensor) -> Tensor:
        self._checksums += [_checksum(image) for image in pixels]
        return pixels

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Read the rows after those of the last call. Row 0 may be asked for any number of times, as padding."""
        numbers = _numbers(rows)
        while self._done <= numbers[-1]:
            self._next()
        if gone := [number for number in numbers if number not in self._waiting]:
            raise DistapError(
                f"{self._name(gone[0])}: data.pixels.hold is reread, which reads an image once for replay, but "
                "replay has to start over; set replay.size lower if memory ran out, or data.pixels.hold to spool"
            )
        pixels = torch.stack([self._waiting[number] for number in numbers])
        self._waiting = {row: image for row, image in self._waiting.items() if row > numbers[-1] or row == 0}
        return pixels

    def blank(self, rows: list[int]) -> None:
        self._blank.update(rows)

    def finish(self) -> None:
        """Read on to the end, in case not every image was replayed."""
        while self._done < len(self._checksums):
            self._next()
            self._waiting.clear()

    def _next(self) -> None:
        pixels = self._again()
        for row, image in enumerate(pixels, self._done):
            if _checksum(image) != self._checksums[row]:
                raise DistapError(
                    f"{self._name(row)}: read again for replay, it has other pixels than those that were described; "
                    "data must not change during a training. If it did not, set data.pixels.hold to spool"
                )
            self._waiting[row] = image.zero_() if row in self._blank else image
        self._done += len(pixels)


HeldPixels = PixelsInMemory | Spool | Reread


def _numbers(rows: slice | Tensor) -> Sequence[int]:
    numbers: list[int] | range = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
    return numbers


def _checksum(image: Tensor) -> int:
    return zlib.crc32(image.contiguous().numpy().data.cast("B"))
