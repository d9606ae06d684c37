"""Hold the pixels of a rank's images between describe and replay: in memory, in a spool file, or nowhere.

Pixels wait as uint8, as the loader gave them, and come back byte for byte in each of the three ways.
"""

import errno
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from distap.data.settings import PixelSettings
from distap.errors import DistapError

WITHOUT_RESERVATION = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # answers of file systems that cannot reserve
FULL = (errno.ENOSPC, errno.EDQUOT)
ZEROS = 4 * 2**20  # bytes written at once to reserve space by writing


def held_pixels(settings: PixelSettings, count: int, size: int, pinned: bool) -> "PixelsInMemory | Spool | None":
    """Room for the pixels of `count` images of size x size; None if they are to be read again.

    Args:
        settings: the way to hold them.
        count: rows.
        size: width and height, pixels.
        pinned: rows come back in page-locked memory, from which a GPU copies without waiting.
    Raises:
        DistapError: the spool file cannot be made, or its file system has too little space.
    """
    way = settings.way(3 * count * size * size)
    if way == "memory":
        return PixelsInMemory(count, size, pinned)
    if way == "spool":
        return Spool(count, size, settings.spool_folder or Path(tempfile.gettempdir()), pinned)
    return None


class PixelsInMemory:
    """Pixels that stay in memory; the arguments are those of `held_pixels`."""

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
    """Pixels that wait in a file without a name, whose space is reserved before the first row is written.

    The methods are those of `PixelsInMemory`.

    The rows written last are still in the page cache when replay begins to read, as far as memory allows.

    Raises:
        DistapError: the folder cannot be written to, or its file system has too little space.
    """

    def __init__(self, count: int, size: int, folder: Path, pinned: bool) -> None:
        self._folder, self._shape, self._pinned = folder, (3, size, size), pinned
        self._row_bytes = 3 * size * size
        self.spool_size_bytes = count * self._row_bytes
        self._file = _unlinked_file(folder)
        weakref.finalize(self, os.close, self._file)
        with self._told():
            # Ask first: a reservation that fails may have filled the disk for a moment.
            if _free_bytes(self._file) < self.spool_size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _reserve(self._file, self.spool_size_bytes)
        self._buffer = torch.empty(0, *self._shape, dtype=torch.uint8)

    @property
    def spool_limit_bytes(self) -> int:
        """Bytes that the file could take: its size, and what its file system has left."""
        return self.spool_size_bytes + _free_bytes(self._file)

    def keep(self, start: int, pixels: Tensor) -> Tensor:
        data, offset = pixels.contiguous().numpy().data.cast("B"), start * self._row_bytes
        with self._told():
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        return pixels

    def rows(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            return self._read(self._room(rows.stop - rows.start), rows.start)
        pixels = self._room(len(rows))
        for place, row in enumerate(rows.tolist()):
            self._read(pixels[place : place + 1], row)
        return pixels

    def blank(self, rows: list[int]) -> None:
        for row in rows:
            self.keep(row, torch.zeros(1, *self._shape, dtype=torch.uint8))

    def _read(self, pixels: Tensor, start: int) -> Tensor:
        buffer, offset = pixels.numpy().data.cast("B"), start * self._row_bytes
        while buffer:
            with self._told():
                read = os.preadv(self._file, [buffer], offset)
            if read == 0:
                raise DistapError(f"{self._folder}: the spool file has become shorter; nothing else may write to it")
            buffer, offset = buffer[read:], offset + read
        return pixels

    def _room(self, count: int) -> Tensor:
        if self._pinned:
            # A copy to the GPU may still read the rows handed out last; torch reuses page-locked memory after it.
            return torch.empty(count, *self._shape, dtype=torch.uint8, pin_memory=True)
        if len(self._buffer) < count:
            self._buffer = torch.empty(count, *self._shape, dtype=torch.uint8)
        return self._buffer[:count]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise errors of the file system as DistapErrors that say what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise DistapError(f"{self._folder}: the spool file cannot be used: {error}") from error
            raise DistapError(
                f"{self._folder}: too little space for the pixels of a step: this rank's spool file takes "
                f"{self.spool_size_bytes} bytes, {_free_bytes(self._file)} are free; each rank of the host has one. "
                "Make room, name another folder in data.pixels.spool_folder, set data.pixels.hold to reread, or "
                "spread the batch over more hosts"
            ) from error


class Reread:
    """Pixels that are not kept: each image is read, decoded and augmented again, once and in order.

    Only checksums are kept, so that no image that has changed meanwhile trains the network.

    Args:
        again: reads the next rows again, any number at once.
        name: gives the shard and key of the image in a row.
    """

    spool_size_bytes = spool_limit_bytes = 0

    def __init__(self, again: Callable[[], Tensor], name: Callable[[int], str]) -> None:
        self._again, self._name = again, name
        self._checksums: list[int] = []
        self._blank: set[int] = set()
        self._done = 0  # rows read again
        self._first: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # rows read again that have not been asked for

    def keep(self, start: int, pixels: Tensor) -> Tensor:
        self._checksums += [_checksum(image) for image in pixels]
        return pixels

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Read the rows after those of the call before again. Row 0 may be asked for any number of times, as padding.

        Raises:
            DistapError: an image has changed, or was asked for before.
        """
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        if list(numbers) == [0] and self._first is not None:
            return self._first
        while self._done <= numbers[-1]:
            self._next()
        if numbers[0] not in self._waiting:
            raise DistapError(
                f"{self._name(numbers[0])}: data.pixels.hold is reread, which reads an image once for replay, but "
                "replay has to start over; set replay.size lower if memory ran out, or data.pixels.hold to spool"
            )
        pixels = torch.stack([self._waiting[number] for number in numbers])
        self._waiting = {number: image for number, image in self._waiting.items() if number > numbers[-1]}
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
        if self._first is None:
            self._first = pixels[:1].clone()
        self._done += len(pixels)


HeldPixels = PixelsInMemory | Spool | Reread


def _unlinked_file(folder: Path) -> int:
    """The descriptor of a new file that disappears with this process."""
    try:
        file, path = tempfile.mkstemp(prefix="distap-spool-", dir=folder)
    except OSError as error:
        raise DistapError(
            f"data.pixels.spool_folder: {folder}: no spool file can be made there: {error}; it has to be a folder "
            "that this user may write to"
        ) from error
    Path(path).unlink()
    return file


def _free_bytes(file: int) -> int:
    """Bytes that an ordinary user may still write to the file system of this file."""
    status = os.fstatvfs(file)
    return status.f_bavail * status.f_frsize


def _reserve(file: int, size: int) -> None:
    """Reserve space for the file, by writing zeros if the file system has no other way."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in WITHOUT_RESERVATION:
            raise
        zeros = bytes(ZEROS)
        offset = 0
        while offset < size:
            offset += os.pwrite(file, zeros[: size - offset], offset)


def _checksum(image: Tensor) -> int:
    return zlib.crc32(image.contiguous().numpy().data.cast("B"))
