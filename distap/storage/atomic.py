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
    try:
        replace_file(path, data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, data: bytes) -> None:
    """The same for bytes, with the system's own errors, of which some are worth another attempt."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    make_folder(path.parent)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are missing; their names are on the disk then."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Bring what is in a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
