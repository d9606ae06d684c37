"""Write files so that a crash or a full disk leaves the old or the new one, and identify files."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from distap.errors import DistapError
from distap.storage.texts import open_regular

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems that cannot sync a folder


def write_whole(path: Path, data: bytes | str) -> None:
    """Replace a file atomically, text as UTF-8; make missing folders.

    On return the file survives a loss of power.
    """
    try:
        with replacing(path) as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise _not_written(path, error) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` on leaving the context, unless an error occurs.

    Raises:
        DistapError: `path` is a device, a pipe or a folder, which no file may replace.
    """
    if path.exists() and not path.is_file():
        raise DistapError(
            "storage.not_a_file",
            f"{path}: no regular file, so nothing can be written in its place; name a new file",
        )
    # In the same folder, since a rename is atomic within one file system only.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    make_folder(path.parent)
    try:
        with aside.open("wb") as file:
            yield file
            # The rename may reach the disk before the data, and a loss of power in between would
            # leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def require_free(folder: Path) -> None:
    """Raise a DistapError unless a folder of this name can appear by renaming another."""
    if folder.name in ("", ".."):
        raise DistapError(
            "storage.bad_folder", f"{folder}: give the folder to write a name of its own"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DistapError(
            "storage.folder_taken",
            f"{folder}: there is something already; choose another folder or remove it",
        )
    if folder.is_mount():
        raise DistapError(
            "storage.bad_folder",
            f"{folder}: the root of a file system cannot appear by a rename; choose a folder in it",
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the context ends without an error.

    `path` must be free: it does not exist, or is an empty folder.
    """
    require_free(path)
    path = path.resolve()  # where a link leads to
    try:
        make_folder(path.parent)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
            new = Path(aside, "new")
            new.mkdir()
            yield new
            for written in (*new.rglob("*"), new):
                sync_path(written)
            new.rename(path)  # an error if another process has written there meanwhile
        sync_path(path.parent)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> DistapError:
    return DistapError(
        "storage.cannot_write", f"{path}: cannot be written: {error.strerror or error}"
    )


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and flush their names to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileIdentity:
    """Size and SHA-256 of a file; they differ if the file is damaged or another one."""

    bytes: int
    sha256: str  # not compared if ""

    def difference(self, path: Path, record: str) -> str:
        """Return how a file differs from this identity, which `record` holds; "" if it does not."""
        try:
            size = path.stat().st_size
            if size != self.bytes:
                return f"damaged or another file: {size} bytes, not the {self.bytes} in {record}"
            if self.sha256 and file_identity(path) != self:
                return f"damaged or another file: its SHA-256 is not the one in {record}"
        except (OSError, ValueError) as error:
            return f"{getattr(error, 'strerror', None) or error}, though {record} names it"
        return ""


def file_identity(path: Path) -> FileIdentity:
    with open_regular(path) as file:
        return FileIdentity(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
