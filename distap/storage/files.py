"""Read, write and list the files of a folder, on disk or behind a URL, with one retry policy."""

import io
import os
import shutil
from collections import Counter
from contextlib import suppress
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from fsspec.core import strip_protocol

from distap.errors import DistapError
from distap.storage import remotes
from distap.storage.atomic import replacing
from distap.storage.locations import joined, scheme_of
from distap.storage.remotes import file_system, retried
from distap.storage.texts import open_regular

REQUEST_BYTES = 8 * 2**20  # bytes of one request when a whole file is read
SENT_PART = 64 * 2**20  # bytes of a large file that are sent within a time-out
LARGEST_WHOLE = 2**31 - 1  # bytes of a web server's file that is read into memory
LARGE_FILE = 16 * 2**20  # bytes of a file on disk that is mapped


class Storage:
    """Files of a folder: a path or file:// URL on disk, or another URL that fsspec knows.

    Any thread may use it, and it can be copied into other processes. See `retried` for the errors
    of its methods.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self.scheme = scheme_of(base) or "file"
        # The folder, if it is on this host's disk.
        self.disk = Path(base.removeprefix("file://")) if self.scheme == "file" else None
        self.meter = Counter[str]()  # read_bytes and retries, for the metrics
        self._made: tuple[int, Any] | None = None  # process and its file system

    def where(self, name: str) -> str:
        return joined(self.base, quote(name) if self.scheme in ("http", "https") else name)

    @retried("read")
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._size(name)

    @retried("read")
    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end of the file."""
        data = b""
        if size:
            data = bytes(self._files.cat_file(self.where(name), start=offset, end=offset + size))
        # A short answer is the end of the file, or one that broke off without contradicting its
        # headers.
        if len(data) < size:
            expected = min(size, self._size(name) - offset)
            if len(data) < expected:
                raise OSError(f"the connection ended after {len(data)} bytes of {expected}")
        self.meter["read_bytes"] += len(data)
        return data

    def read_whole(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    @retried("read")
    def mapped(self, name: str) -> bytes | mmap:
        """Return a whole file; map a large file on disk into memory instead of reading it."""
        if self.disk is None:
            return self.read_whole(name)
        try:
            file = open_regular(self.disk / name)
        except ValueError as error:
            raise DistapError("storage.not_a_file", f"{self.where(name)}: {error}") from error
        with file:
            if os.fstat(file.fileno()).st_size < LARGE_FILE:  # a mapped file stays open
                return file.read()
            return mmap(file.fileno(), 0, access=ACCESS_READ)

    def open(self, name: str) -> BinaryIO:
        """Open a file of any size. Each block is one `read`, which can be retried."""
        return io.BufferedReader(_Blocks(self, name), REQUEST_BYTES)

    @retried("listed")
    def names(self, pattern: str) -> list[str]:
        """Return the names of files that match a glob, sorted."""
        if self.disk is not None:  # whose own name may hold the signs of a glob
            return sorted(
                path.relative_to(self.disk).as_posix()
                for path in self.disk.glob(pattern)
                if path.is_file()
            )
        start = joined(strip_protocol(self.base), "")
        entries = self._files.glob(start + pattern, detail=True)
        return sorted(
            path.removeprefix(start) for path, info in entries.items() if info["type"] == "file"
        )

    @retried("listed")
    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the files below a folder, by name; {} without the folder."""
        start = joined(strip_protocol(self.base), "")
        try:
            entries = self._files.find(start + folder, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {str(path).removeprefix(start): int(info["size"]) for path, info in entries.items()}
        return {name: size for name, size in sizes.items() if name.startswith(f"{folder}/")}

    @retried("written")
    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically; on return it survives a loss of power."""
        if self.disk is None:
            self._files.pipe_file(self.where(name), data, timeout=remotes.TIMEOUT_SECONDS)
            return
        with replacing(self.disk / name) as file:
            file.write(data)

    @retried("written")
    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists; return True for the one writer that succeeds.

        Object stores that do not know If-None-Match, which S3 and Google's do, replace the other
        writer's.
        """
        try:
            self._files.pipe_file(
                self.where(name), data, mode="create", timeout=remotes.TIMEOUT_SECONDS
            )
        except FileExistsError:
            return False
        return True

    @retried("written")
    def upload(self, name: str, path: Path) -> None:
        """Copy a local file of any size to `name`; on return it survives a loss of power."""
        if self.disk is None:
            # Without this time-out, s3fs waits without end for a server that is silent.
            seconds = remotes.TIMEOUT_SECONDS * max(1, path.stat().st_size / SENT_PART)
            self._files.put_file(str(path), self.where(name), timeout=seconds)
            return
        with path.open("rb") as source, replacing(self.disk / name) as file:
            shutil.copyfileobj(source, file, REQUEST_BYTES)

    def download(self, name: str, path: Path) -> None:
        """Copy a file of any size to `path`, whose folder exists; each request can be retried."""
        with self.open(name) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, REQUEST_BYTES)

    @retried("removed")
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self.where(name))
        if self.disk is not None:
            with suppress(OSError):
                (self.disk / name).parent.rmdir()  # a bucket has no empty folders either

    def _size(self, name: str) -> int:
        info = self._files.info(self.where(name))
        if info["type"] == "directory":
            raise DistapError(
                "storage.not_a_file", f"{self.where(name)}: expected a file, not a folder"
            )
        if info["size"] is None:
            raise DistapError(
                "storage.no_size",
                f"{self.where(name)}: the server does not tell the file's size (Content-Length)",
            )
        return int(info["size"])

    @property
    def _files(self) -> Any:
        """Return the file system of this process: a fork must not use its parent's connections."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), file_system(self.scheme)
        return self._made[1]


class _Blocks(io.RawIOBase):
    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._offset = 0
        self._size = storage.size(name)

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:  # the base class would read pieces of 8 KiB
        if self._storage.scheme in ("http", "https") and self._size > LARGEST_WHOLE:
            raise DistapError(
                "storage.too_large",
                f"{self._storage.where(self._name)}: more than {LARGEST_WHOLE:,} bytes",
            )
        return b"".join(iter(partial(self.read, REQUEST_BYTES), b""))

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), REQUEST_BYTES, self._size - self._offset)
        data = self._storage.read(self._name, self._offset, wanted) if wanted > 0 else b""
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
