"""Files that are written whole or not at all, whenever the machine stops."""

import errno
import os
from pathlib import Path

from distap.errors import DistapError

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # what file systems say that cannot sync a folder


class UnwritableError(DistapError):
    """A file cannot be written."""


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file, text as UTF-8, by way of another one in its folder, which is made; it is on the disk then.

    Raises:
        UnwritableError: it cannot be written; what was there before is there still.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written: {error.strerror or error}") from error


def sync_file(file: Path) -> None:
    """Bring a file that was written, and its name, to the disk."""
    _sync(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
