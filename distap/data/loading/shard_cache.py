"""Shards kept on a host's own disk, for all its ranks and loader workers together.

    FOLDER/lock                          held while files come and go
    FOLDER/FINGERPRINT/in-use            held, shared, by every process that reads this data set
    FOLDER/FINGERPRINT/SHA256.tar        a whole shard
    FOLDER/FINGERPRINT/SHA256.part       one on its way; its writer holds it, so what nobody holds is a leftover

Reading never waits for a download: what is not there yet comes from its source, and the shard is fetched in the
background by one process of the host. The shards of a data set are never evicted for one another, since its images
are read in random order and would chase each other out; what does not fit goes on coming from its source.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.storage.files import BLOCK, OpenFiles, Storage, storage_of
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Meter

LOCK, IN_USE, SAID = "lock", "in-use", "said"
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class CacheSettings:
    """Where shards are kept on each host's own disk, and how much of it they may take."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    folder: Path
    max_bytes: int  # of all data sets together

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes: {self.max_bytes}: expected a number of bytes above 0")


class ShardCache:
    """The kept shards of one data set; safe to copy into other processes, to be used by one thread of each.

    Args:
        settings: where, and how much.
        index: of the data set.
        base: where its shards come from.
        remote: how that is reached.
        meter: counts what downloading takes.
    Raises:
        DistapError: the folder cannot be used.
    """

    def __init__(
        self, settings: CacheSettings, index: Index, base: str, remote: RemoteSettings, meter: Meter
    ) -> None:
        self.root = Path(settings.folder)
        self.folder = self.root / index.fingerprint[:32]
        self.max_bytes = settings.max_bytes
        self._base, self._remote, self._meter = base, remote, meter
        self._names: list[str] = index.shard_name.tolist()
        self._sizes: list[int] = index.shard_size.tolist()
        self._digests: list[str] = index.shard_sha256.tolist()
        self._process = self._enter()
        if sum(self._sizes) > self.max_bytes:
            logger.info("%s: data.cache.max_bytes holds part of %s; the rest is read from there", self.root, base)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Bytes of a kept shard; None where it is not kept (yet)."""
        process, path = self._of_process(), self._path(shard)
        try:
            if process.files.size(path) == self._sizes[shard]:
                return process.files.read(path, offset, size)
            self.drop(shard)
        except FileNotFoundError:
            self._fetch_later(shard)
        except OSError:
            self.drop(shard)
        return None

    def drop(self, shard: int) -> None:
        """Forget a kept shard that turned out to be damaged, and fetch it again."""
        process, path = self._of_process(), self._path(shard)
        with suppress(OSError):
            if process.files.is_at(path):  # and not one that another process has fetched since
                Path(path).unlink()
        process.files.close(path)
        process.asked.discard(shard)
        self._fetch_later(shard)

    def wait(self) -> None:
        """Until this process fetches nothing any more."""
        thread = self._of_process().thread
        if thread is not None:
            thread.join()

    def _path(self, shard: int) -> str:
        return str(self.folder / f"{self._digests[shard]}.tar")

    def _of_process(self) -> "_Process":
        if self._process is None or self._process.number != os.getpid():
            self._process = self._enter()
        return self._process

    def _enter(self) -> "_Process":
        """Say that this process reads the data set; the first one on the host clears away what was left behind."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self.folder.mkdir(mode=0o700, exist_ok=True)
                in_use = _opened(self.folder / IN_USE)
                if _try_lock(in_use):
                    (self.folder / SAID).unlink(missing_ok=True)
                fcntl.flock(in_use, fcntl.LOCK_SH)
                os.utime(in_use)
                self._clear_leftovers()
        except OSError as error:
            raise DistapError(f"{self.root}: data.cache.folder cannot be used: {error.strerror or error}") from error
        return _Process(in_use)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = _opened(self.root / LOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            _release(file)

    def _fetch_later(self, shard: int) -> None:
        process = self._of_process()
        with process.lock:
            if shard in process.asked or process.has_no_room:
                return
            process.asked.add(shard)
            process.queue.append(shard)
            if process.thread is None or not process.thread.is_alive():
                process.thread = threading.Thread(target=self._fetch_all, args=(process,), daemon=True)
                process.thread.start()

    def _fetch_all(self, process: "_Process") -> None:
        storage = storage_of(self._base, self._remote)
        storage.meter = self._meter
        while True:
            with process.lock:
                if not process.queue or process.has_no_room:
                    process.thread = None
                    return
                shard = process.queue.popleft()
            try:
                process.has_no_room = not self._fetch(shard, storage)
            except DistapError as error:  # reading the source itself says so to training, where it matters
                logger.warning("data.cache: %s", error)
            except OSError as error:
                process.has_no_room = True
                self._say_once(f"{self.root}: no more shards are kept: {error.strerror or error}")

    def _fetch(self, shard: int, storage: Storage) -> bool:
        """Fetch a shard unless another process does; False where it has no room."""
        part = self.folder / f"{self._digests[shard]}.part"
        with self._locked():
            if Path(self._path(shard)).exists():
                return True
            file = _opened(part)
            try:
                if not _try_lock(file):
                    os.close(file)
                    return True
                if not self._has_room(self._sizes[shard], part):
                    raise _NoRoomError
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, self._sizes[shard])  # a full disk is found now
            except (OSError, _NoRoomError) as error:
                _give_up(part, file)
                if isinstance(error, _NoRoomError):
                    return False
                raise
        try:
            self._download(shard, storage, file)
            with self._locked():
                part.replace(self._path(shard))
                _release(file)
        except BaseException:
            with self._locked():
                _give_up(part, file)
            raise
        return True

    def _download(self, shard: int, storage: Storage, file: int) -> None:
        name, digest, offset = self._names[shard], hashlib.sha256(), 0
        with storage.open(name) as source:
            while offset <= self._sizes[shard] and (data := source.read(BLOCK)):
                digest.update(data)
                os.pwrite(file, data, offset)
                offset += len(data)
        if offset != self._sizes[shard] or digest.hexdigest() != self._digests[shard]:
            raise DistapError(
                f"{storage.where(name)}: its bytes are not those that were indexed, so it is not kept; make the "
                "index anew with `distap data index`"
            )
        os.fsync(file)

    def _has_room(self, size: int, part: Path) -> bool:
        """Whether there is room, if need be without data sets that nobody reads, the oldest first."""
        used = sum(_size(entry) for folder in self._folders() for entry in _files(folder) if entry.path != str(part))
        others = [folder for folder in self._folders() if folder != self.folder]
        for folder in sorted(others, key=lambda folder: (folder / IN_USE).stat().st_mtime):
            if used + size <= self.max_bytes:
                break
            in_use = _opened(folder / IN_USE)
            if _try_lock(in_use):
                freed = sum(_size(entry) for entry in _files(folder))
                shutil.rmtree(folder)
                used -= freed
            os.close(in_use)
        return used + size <= self.max_bytes

    def _folders(self) -> list[Path]:
        """Of the data sets that are kept; whatever else is in the cache's folder is not ours."""
        with os.scandir(self.root) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if _FINGERPRINT.fullmatch(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and (Path(entry.path) / IN_USE).is_file()
            ]

    def _clear_leftovers(self) -> None:
        for entry in _files(self.folder):
            if entry.name.endswith(".part"):
                file = _opened(Path(entry.path))
                if _try_lock(file):
                    _give_up(Path(entry.path), file)
                else:
                    os.close(file)

    def _say_once(self, message: str) -> None:
        """To the log of one process of the host."""
        with suppress(OSError):
            os.close(os.open(self.folder / SAID, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            logger.warning("%s; what is not kept is read from %s", message, self._base)


class _NoRoomError(Exception):
    """What is kept would exceed the limit."""


class _Process:
    """What one process has of the cache."""

    def __init__(self, in_use: int) -> None:
        self.number = os.getpid()
        self.files = OpenFiles()
        self.lock = threading.Lock()
        self.asked: set[int] = set()
        self.queue: deque[int] = deque()
        self.thread: threading.Thread | None = None
        self.has_no_room = False
        # Not unlocked but closed: a forked worker still holds it.
        weakref.finalize(self, os.close, in_use)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(file: int) -> None:
    # A worker that was forked meanwhile has the file too, and would go on holding the lock.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _give_up(part: Path, file: int) -> None:
    part.unlink(missing_ok=True)
    _release(file)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.is_file(follow_symlinks=False)]


def _size(entry: os.DirEntry[str]) -> int:
    """In bytes; none of a file that was dropped since the folder was looked through."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
