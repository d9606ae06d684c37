"""Read, write and list the files of a folder, on disk or behind a URL, with one retry policy."""

import asyncio
import io
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from fsspec.core import strip_protocol

from distap.errors import DistapError
from distap.storage import remotes
from distap.storage.atomic import replacing
from distap.storage.locations import joined, scheme_of
from distap.storage.ranges import Range, coalesced
from distap.storage.remotes import CONNECTIONS, file_system, retried
from distap.storage.texts import open_regular

REQUEST_BYTES = 8 * 2**20  # bytes of one request when a whole file is read
AHEAD = 4  # requests for blocks of a file that are under way
COALESCED = 64 * 2**10  # bytes between two ranges of a file that are read rather than left out
SENT_PART = 64 * 2**20  # bytes of a large file that are sent within a time-out
LARGEST_WHOLE = 2**31 - 1  # bytes of a web server's file that is read into memory
LARGE_FILE = 16 * 2**20  # bytes of a file on disk that is mapped

# Of the threads that use a storage. A fork waits for it, since its child could never release it.
_LOCK = threading.Lock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


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
        # For the metrics: requests for bytes, the bytes that came (read_bytes), those of them that
        # were wanted (used_bytes), and retries.
        self.meter = Counter[str]()
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
            self.count(requests=1)
            data = bytes(self._files.cat_file(self.where(name), start=offset, end=offset + size))
        # A short answer is the end of the file, or one that broke off without contradicting its
        # headers.
        if len(data) < size:
            expected = min(size, self._size(name) - offset)
            if len(data) < expected:
                raise OSError(f"the connection ended after {len(data)} bytes of {expected}")
        self.count(read_bytes=len(data), used_bytes=len(data))
        return data

    def read_many(self, ranges: Sequence[Range], requests: int = CONNECTIONS) -> list[bytes]:
        """Return the bytes of many ranges, in their order; remote ranges are requested at once.

        Each is what `read` returns, with its errors. Up to `requests` requests are under way, and
        neighbours share one. The ranges of a request that fails or is cut are read one by one.
        """
        if not self._files.async_impl:
            return [self.read(*part) for part in ranges]
        shared = coalesced(ranges, COALESCED, REQUEST_BYTES)
        data = [b""] * len(ranges)
        answers = self._answers([request.range for request in shared], requests)
        for (whole, numbers), answer in zip(shared, answers, strict=True):
            is_whole = not isinstance(answer, Exception) and len(answer) == whole.size
            if is_whole:
                self.count(read_bytes=whole.size)
            else:
                self.count(retries=1)
            for number in numbers:
                name, offset, size = ranges[number]
                if is_whole:
                    start = offset - whole.offset
                    data[number] = bytes(answer[start : start + size])
                    self.count(used_bytes=size)
                else:
                    data[number] = self.read(name, offset, size)
        return data

    def _answers(self, ranges: list[Range], requests: int) -> list[Any]:
        """Return the bytes that the store sends for each range, or the error."""
        if not ranges:
            return []
        self.count(requests=len(ranges))
        paths = [self.where(part.name) for part in ranges]
        starts = [part.offset for part in ranges]
        ends = [part.end for part in ranges]
        return list(
            self._files.cat_ranges(paths, starts, ends, batch_size=requests, on_error="return")
        )

    def count(self, **amounts: int) -> None:
        """Add to the meter, from any thread."""
        with _LOCK:
            for name, amount in amounts.items():
                self.meter[name] += amount

    def drained(self) -> Counter[str]:
        """Return what the meter has counted since the last call, from any thread."""
        with _LOCK:
            counts = self.meter.copy()
            self.meter.clear()
        return counts

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

    def open(self, name: str, size: int | None = None) -> BinaryIO:
        """Open a file of any size, which is read forwards; its blocks can be retried.

        `size` spares a request for the file's size where it is known. The next blocks of a remote
        file are under way while one is used.
        """
        return io.BufferedReader(_Blocks(self, name, self.size(name) if size is None else size))

    def blocks(self, name: str, size: int) -> Generator[bytes]:
        """Yield a file of `size` bytes in blocks, asking ahead for those of a remote file."""
        blocks = [
            Range(name, start, min(REQUEST_BYTES, size - start))
            for start in range(0, size, REQUEST_BYTES)
        ]
        if len(blocks) == 1 or not self._files.async_impl:
            for block in blocks:
                yield self.read(*block)
            return
        asked = deque[Future[bytes]]()
        try:
            for number, block in enumerate(blocks):
                asked.extend(map(self._asked, blocks[number + len(asked) : number + AHEAD]))
                data = b""
                with suppress(Exception):  # each file system raises its own; `read` explains them
                    data = bytes(asked[0].result())
                asked.popleft()
                if len(data) == block.size:
                    self.count(read_bytes=block.size, used_bytes=block.size)
                else:
                    self.count(retries=1)
                    data = self.read(*block)
                yield data
        finally:
            for request in asked:
                request.cancel()

    def _asked(self, block: Range) -> Future[bytes]:
        """Ask for a range of a remote file, whose bytes are the result."""
        files = self._files
        self.count(requests=1)
        request = files._cat_file(self.where(block.name), start=block.offset, end=block.end)
        return asyncio.run_coroutine_threadsafe(request, files.loop)

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

    @retried("listed")
    def modified(self, name: str) -> float:
        """Return when a file was written last, in seconds since 1970."""
        path = joined(strip_protocol(self.base), name)
        time: float = self._files.modified(path).timestamp()
        return time

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
        with _LOCK:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), file_system(self.scheme)
            return self._made[1]


class _Blocks(io.RawIOBase):
    def __init__(self, storage: Storage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        self._size = size
        self._blocks = storage.blocks(name, size)
        self._block = memoryview(b"")  # of the last one, what is not read yet

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:  # the base class would read pieces of 8 KiB
        if self._storage.scheme in ("http", "https") and self._size > LARGEST_WHOLE:
            raise DistapError(
                "storage.too_large",
                f"{self._storage.where(self._name)}: more than {LARGEST_WHOLE:,} bytes",
            )
        return b"".join([self._block, *self._blocks])

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        return size

    def close(self) -> None:
        self._blocks.close()
        super().close()
