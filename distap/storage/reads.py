"""The bytes of a data set's files, wherever they are: positioned reads that are retried, timed and counted."""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from distap.storage.atomic import write_whole
from distap.storage.locations import joined, scheme_of
from distap.storage.remotes import RemoteSettings, retried

BLOCK = 8 * 2**20  # bytes of one request when a whole file is read
OPEN_FILES = 128  # that a process keeps open of a data set
T = TypeVar("T")


class Traffic(NamedTuple):
    """What reading took, in a process, since it was last asked."""

    read_bytes: int = 0
    retries: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """Both together."""
        return Traffic(*(mine + others for mine, others in zip(self, other, strict=True)))


class Meter:
    """Counts traffic, from any thread; copies in other processes count for themselves."""

    def __init__(self) -> None:
        self._state = self._fresh()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self._state = self._fresh()

    def add(self, traffic: Traffic) -> None:
        """Count."""
        _, lock, total = self._own()
        with lock:
            total[0] = total[0].plus(traffic)

    def add_retry(self) -> None:
        """Count a further attempt."""
        self.add(Traffic(retries=1))

    def take(self) -> Traffic:
        """What was counted since this was last called."""
        _, lock, total = self._own()
        with lock:
            taken, total[0] = total[0], Traffic()
        return taken

    def _own(self) -> tuple[int, threading.Lock, list[Traffic]]:
        if self._state[0] != os.getpid():
            self._state = self._fresh()  # a lock may be held at the moment of a fork
        return self._state

    @staticmethod
    def _fresh() -> tuple[int, threading.Lock, list[Traffic]]:
        return os.getpid(), threading.Lock(), [Traffic()]


class About(NamedTuple):
    """A file's size in bytes, and a text that changes when the file does."""

    size: int
    version: str


class Storage(Protocol):
    """A folder of files, on disk or behind a URL; safe to copy into other processes."""

    base: str
    meter: Meter

    def where(self, name: str) -> str:
        """Path or URL of a file, for messages."""
        ...

    def about(self, name: str) -> About:
        """Size and version of a file.

        Raises:
            MissingFileError: there is none.
            DistapError: it cannot be reached.
        """
        ...

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only at the end of the file; raises what `about` does."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The file from its first byte on; its reads raise what `about` does."""
        ...

    def names(self, pattern: str) -> list[str]:
        """Names of the files that match a glob, sorted."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        ...


def storage_of(base: str, settings: RemoteSettings | None = None) -> Storage:
    """The storage of a source's base, a folder or the URL of one."""
    settings = settings or RemoteSettings()
    if scheme_of(base):
        from distap.storage.remote_files import RemoteStorage  # fsspec's file systems are heavy

        return RemoteStorage(base, settings)
    return LocalStorage(base, settings)


class OpenFiles:
    """Descriptors of local files, the last ones used; each process has its own, since a fork would share a file."""

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self.limit = limit
        self._files: OrderedDict[str, int] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "_files": OrderedDict(), "_process": os.getpid()}

    def __del__(self) -> None:
        self._close_all()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only at the end of the file."""
        try:
            return read_at(self._file(path), offset, size)
        except OSError:
            self.close(path)  # a stale handle is mended by opening the file anew
            raise

    def size(self, path: str) -> int:
        """Bytes of the file that is open."""
        return os.fstat(self._file(path)).st_size

    def is_at(self, path: str) -> bool:
        """Whether what is open is what the path leads to now; raises OSError where that is nothing."""
        return os.path.samestat(os.fstat(self._file(path)), Path(path).stat())

    def close(self, path: str) -> None:
        """Forget a file."""
        if path in self._files:
            os.close(self._files.pop(path))

    def _file(self, path: str) -> int:
        if self._process != os.getpid():
            self._close_all()
            self._process = os.getpid()
        if path not in self._files:
            if len(self._files) >= self.limit:
                os.close(self._files.popitem(last=False)[1])
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(path)
        return self._files[path]

    def _close_all(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class LocalStorage:
    """Files of a folder; what passes on network file systems is retried as for remotes."""

    def __init__(self, base: str, settings: RemoteSettings | None = None) -> None:
        self.base = base
        self.meter = Meter()
        self._settings = settings or RemoteSettings()
        self._files = OpenFiles()

    def where(self, name: str) -> str:
        """Path of a file."""
        return joined(self.base, name)

    def about(self, name: str) -> About:
        """Size, and time of the last change, of a file."""
        status = self._retried(name, Path(self.where(name)).stat)
        return About(status.st_size, f"{status.st_mtime_ns}")

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only at the end of the file."""
        data = self._retried(name, lambda: self._files.read(self.where(name), offset, size))
        self.meter.add(Traffic(read_bytes=len(data)))
        return data

    def open(self, name: str) -> BinaryIO:
        """The file from its first byte on."""
        return whole_file(self, name)

    def names(self, pattern: str) -> list[str]:
        """Names of the files that match a glob, sorted."""
        base = Path(self.base)
        return sorted(path.relative_to(base).as_posix() for path in base.glob(pattern) if path.is_file())

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        write_whole(Path(self.where(name)), data)

    def _retried(self, name: str, call: Callable[[], T]) -> T:
        return retried(call, self.where(name), self._settings, on_retry=self.meter.add_retry)


def read_at(file: int, offset: int, size: int) -> bytes:
    """`size` bytes of an open file from `offset`, fewer only at its end."""
    parts = []
    while size > 0 and (part := os.pread(file, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def whole_file(storage: Storage, name: str) -> BinaryIO:
    """A file from its first byte on, in large positioned reads: each can be retried, and none is open for long."""
    return io.BufferedReader(_Blocks(storage, name), BLOCK)


class _Blocks(io.RawIOBase):
    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name, self._offset = storage, name, 0
        self._size = storage.about(name).size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), BLOCK, self._size - self._offset)
        data = self._storage.read(self._name, self._offset, wanted) if wanted > 0 else b""
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
