"""Hold a rank's pixels between describe and replay: in memory, or in a mapped file if they are many.

Pixels wait as uint8, as the loader gave them, and come back byte for byte either way.
"""

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from distap.data.pixel_settings import PixelSettings
from distap.errors import DistapError

FULL = (errno.ENOSPC, errno.EDQUOT)


class HeldPixels:
    """A buffer for the pixels of `count` images of size x size, which all shares of a rank reuse in turn.

    If `pinned`, rows come back in page-locked memory, from which a GPU copies without waiting.
    """

    def __init__(self, settings: PixelSettings, count: int, size: int, pinned: bool) -> None:
        shape, share_bytes = (count, 3, size, size), count * 3 * size * size
        self.spool_size_bytes = 0
        if settings.in_memory(share_bytes):
            self._pixels, self._pins = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned), False
            return
        self.spool_size_bytes = share_bytes
        mapped = _mapped_file(settings.spool_folder or Path(tempfile.gettempdir()), share_bytes)
        self._pixels, self._pins = torch.frombuffer(mapped, dtype=torch.uint8).view(shape), pinned

    def keep(self, start: int, pixels: Tensor) -> None:
        """Store the pixels of the rows from `start` on."""
        self._pixels[start : start + len(pixels)] = pixels

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return (n, 3, size, size) uint8 of stored rows, valid until the next share is read."""
        found = self._pixels[rows]
        # New page-locked memory each time: a copy to the GPU may still read the rows handed out last.
        return found.pin_memory() if self._pins else found

    def blank(self, rows: Tensor) -> None:
        """Make the pixels of these rows black."""
        self._pixels[rows.cpu()] = 0


def _mapped_file(folder: Path, size: int) -> mmap.mmap:
    """Map an unnamed file with its space reserved, because writing to a full disk later would kill the process."""
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed below; the mapping lives on
    except OSError as error:
        raise DistapError(f"data.pixels.spool_folder: {folder}: no spool file can be made: {error}") from error
    with file:
        free = shutil.disk_usage(file.fileno()).free
        try:
            if free < size:  # ask first: a reservation that fails may have filled the disk for a moment
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
        except OSError as error:
            if error.errno not in FULL:
                raise DistapError(f"{folder}: the spool file cannot be used: {error}") from error
            raise DistapError(
                f"{folder}: too little space for pixels: this rank's spool file takes {size} bytes, {free} are free; "
                "each rank of the host has one. Make room, set another data.pixels.spool_folder, or spread the batch "
                "over more hosts"
            ) from error
