"""Read, write and list the files of a folder, on disk or behind a URL, with one retry policy."""

import io
import os
import random
import shutil
import time
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

from distap.errors import DistapError
from distap.storage.atomic import replacing
from distap.storage.locations import joined, scheme_of
from distap.storage.remotes import MissingFileError, RemoteSettings, UnreachableError, answer_to_boto, is_permanent
from distap.storage.traffic import Meter, Traffic

BLOCK = 8 * 2**20  # bytes of one request when a whole file is read
DOWNLOADS = 4  # files that are downloaded at once
OPEN_FILES = 128  # local files that a process keeps open for positioned reads
T = TypeVar("T")


class About(NamedTuple):
    """A file's size in bytes, and a text that changes when the file does."""

    size: int
    version: str


def storage_of(base: str, settings: RemoteSettings | None = None, key: str | None = "data.remote") -> "Storage":
    """Return the storage of a folder, given by its path or URL; see `Storage` for the arguments."""
    if scheme_of(base) in ("", "file"):
        return LocalStorage(base, settings, key)
    from distap.storage.remote_files import RemoteStorage  # fsspec is slow to import

    return RemoteStorage(base, settings, key)


class Storage(ABC):
    """The files of a folder; any thread may use it, and it can be copied into other processes.

    Every method raises MissingFileError if the file does not exist, UnreachableError if all attempts failed for
    reasons that may pass, and DistapError if another attempt cannot help.

    Args:
        base: path or URL of the folder.
        settings: attempts, time-out, and options of the file system.
        key: where a recipe has these settings, for messages; None if they come from elsewhere.
    """

    def __init__(self, base: str, settings: RemoteSettings | None = None, key: str | None = "data.remote") -> None:
        self.base, self.settings, self.key = base, settings or RemoteSettings(), key
        self.meter = Meter()
        self._deadline = float("inf")

    def by(self, deadline: float) -> Self:
        """Return a copy that begins nothing after `deadline`, in seconds of time.monotonic()."""
        bounded = object.__new__(type(self))
        bounded.__dict__ |= self.__dict__ | {"_deadline": deadline}
        return bounded

    def where(self, name: str) -> str:
        """Return the path or URL of a file."""
        return joined(self.base, name)

    def about(self, name: str) -> About:
        return self._retried(lambda: self._about(name), name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end of the file."""
        data = self._retried(lambda: self._read(name, offset, size), name)
        self.meter.add(Traffic(read_bytes=len(data)))
        return data

    def read_whole(self, name: str) -> bytes:
        """Return a small file."""
        return self._retried(lambda: self._read_whole(name), name)

    def open(self, name: str) -> BinaryIO:
        """Open a file of any size. Each block is a positioned read of its own, so that it can be retried."""
        return io.BufferedReader(_Blocks(self, name), BLOCK)

    def names(self, pattern: str) -> list[str]:
        """Return the names of the files that match a glob, sorted."""
        return self._retried(lambda: sorted(self._names(pattern)), pattern, "listed")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file below a folder, by name; {} if there is no such folder."""
        try:
            return self._retried(lambda: self._sizes(folder), folder, "listed")
        except MissingFileError:
            return {}

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, which appears whole and outlasts a loss of power."""
        self._retried(lambda: self._write(name, data), name, "written")

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file of any size to `name`; on return it outlasts a loss of power."""
        self._retried(lambda: self._upload(path, name), name, "written")

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files of any size into an existing local folder, under the last part of their names."""

        def fetch(name: str) -> None:
            self._retried(lambda: self._download(name, folder / name.rpartition("/")[2]), name)

        with ThreadPoolExecutor(DOWNLOADS) as pool:
            for fetched in [pool.submit(fetch, name) for name in names]:
                fetched.result()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order; a file that is gone already is no error."""
        for name in names:
            with suppress(MissingFileError):
                self._retried(lambda name=name: self._remove(name), name, "removed")  # type: ignore[misc]

    @abstractmethod
    def _about(self, name: str) -> About: ...

    @abstractmethod
    def _read(self, name: str, offset: int, size: int) -> bytes: ...

    @abstractmethod
    def _read_whole(self, name: str) -> bytes: ...

    @abstractmethod
    def _names(self, pattern: str) -> Iterable[str]: ...

    @abstractmethod
    def _sizes(self, folder: str) -> dict[str, int]: ...

    @abstractmethod
    def _write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _upload(self, path: Path, name: str) -> None: ...

    @abstractmethod
    def _download(self, name: str, path: Path) -> None: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    def _retried(self, call: Callable[[], T], name: str, done: str = "read") -> T:
        """Call until it succeeds, an error is permanent, or the attempts are used up."""
        where, attempts = self.where(name), self.settings.attempts
        for attempt in range(1, attempts + 1):
            if time.monotonic() > self._deadline:
                raise UnreachableError(f"{where}: not {done} in time: timeout_seconds also limits a whole checkpoint")
            try:
                return call()
            except DistapError:
                raise
            except FileNotFoundError as error:
                raise MissingFileError(f"{where}: there is no such file") from error
            except Exception as error:  # each file system raises its own
                reason = str(error) or str(error.__cause__ or "") or type(error).__name__
                if isinstance(error, TimeoutError) and not answer_to_boto(error)[0]:
                    reason = f"no answer within {self.settings.timeout_seconds:g} s"
                if is_permanent(error):
                    raise DistapError(f"{where}: cannot be {done}: {reason}") from error
                if attempt == attempts:
                    hint = f"; {self.key} has the number of attempts and their time-out" if self.key else ""
                    raise UnreachableError(
                        f"{where}: cannot be {done}: {attempts} attempts failed, the last with: {reason}{hint}"
                    ) from error
            self.meter.add(Traffic(retries=1))
            # A random part, since ranks that fail together must not come back together.
            time.sleep(self.settings.backoff_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        raise AssertionError("at least one attempt")


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


class LocalStorage(Storage):
    """The files of a folder on disk or on a network file system, given as a path or a file:// URL."""

    def __init__(self, base: str, settings: RemoteSettings | None = None, key: str | None = "data.remote") -> None:
        super().__init__(base, settings, key)
        self._files = OpenFiles()

    def _path(self, name: str) -> Path:
        return Path(self.where(name).removeprefix("file://"))

    def _about(self, name: str) -> About:
        status = self._path(name).stat()
        return About(status.st_size, f"{status.st_mtime_ns}")

    def _read(self, name: str, offset: int, size: int) -> bytes:
        return self._files.read(str(self._path(name)), offset, size)

    def _read_whole(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def _names(self, pattern: str) -> Iterable[str]:
        base = self._path("")
        return (path.relative_to(base).as_posix() for path in base.glob(pattern) if path.is_file())

    def _sizes(self, folder: str) -> dict[str, int]:
        base, sizes = self._path(""), {}
        for path in self._path(folder).rglob("*"):
            with suppress(FileNotFoundError):  # another process may remove files meanwhile
                if path.is_file():
                    sizes[path.relative_to(base).as_posix()] = path.stat().st_size
        return sizes

    def _write(self, name: str, data: bytes) -> None:
        with replacing(self._path(name)) as file:
            file.write(data)

    def _upload(self, path: Path, name: str) -> None:
        with path.open("rb") as source, replacing(self._path(name)) as file:
            shutil.copyfileobj(source, file, BLOCK)

    def _download(self, name: str, path: Path) -> None:
        shutil.copyfile(self._path(name), path)

    def _remove(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
        finally:
            with suppress(OSError):
                path.parent.rmdir()  # a bucket has no empty folders either


class OpenFiles:
    """Keep the local files that were read last open; a copy in another process opens its own."""

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self.limit = limit
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()

    def __reduce__(self) -> tuple[type["OpenFiles"], tuple[int]]:
        return OpenFiles, (self.limit,)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end of the file."""
        file, parts = self._file(path), []
        try:
            while size > 0 and (part := os.pread(file.number, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError:
            self.close(path)  # a stale handle is mended by opening the file again
            raise
        return b"".join(parts)

    def size(self, path: str) -> int:
        """Return the bytes of the open file, which may no longer be the one at `path`."""
        return os.fstat(self._file(path).number).st_size

    def is_at(self, path: str) -> bool:
        """Return whether the open file is still the one at `path`. Raises OSError if nothing is there."""
        return os.path.samestat(os.fstat(self._file(path).number), Path(path).stat())

    def close(self, path: str) -> None:
        self._files.pop(path, None)

    def _file(self, path: str) -> "_OpenFile":
        file = self._files.pop(path, None) or _OpenFile(path)
        self._files[path] = file
        if len(self._files) > self.limit:
            self._files.popitem(last=False)
        return file


class _OpenFile:
    """A file descriptor that is closed when nothing refers to it any more, a read in another thread included."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
