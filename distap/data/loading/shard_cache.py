"""Keep shards on a host's own disk, for all its ranks and loader workers together.

    FOLDER/lock                          locked while files come and go
    FOLDER/FINGERPRINT/in-use            locked, shared, by every process that reads this data set
    FOLDER/FINGERPRINT/SHA256.tar        a whole shard
    FOLDER/FINGERPRINT/SHA256.part       a shard on its way, locked by its writer; without a lock it is a leftover

Reading never waits for a download: a shard that is not there yet is read from its source, while one process of the
host fetches it in the background. The shards of one data set never evict each other, since a training reads images in
random order and each shard would soon be wanted again; what does not fit is always read from the source.
"""

import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distap.data.settings import CacheSettings
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.storage.files import BLOCK, Storage, storage_of
from distap.storage.hashing import Hashed
from distap.storage.open_files import OpenFiles

LOCK, IN_USE, SAID = "lock", "in-use", "said"
THREAD = "distap-shard-cache"  # name of the thread that fetches
logger = logging.getLogger("distap")


class ShardCache:
    """The kept shards of the data set in a storage; safe to copy into other processes, for one thread of each."""

    def __init__(self, settings: CacheSettings, index: Index, source: Storage) -> None:
        self._arguments = settings, index, source
        self._source = source
        self.root, self.max_bytes = Path(settings.folder), settings.max_bytes
        self.folder = self.root / index.fingerprint[:32]
        self._names: list[str] = index.shard_name.tolist()
        self._sizes: list[int] = index.shard_size.tolist()
        self._digests: list[str] = index.shard_sha256.tolist()
        self._files = OpenFiles()
        self._asked: set[int] = set()
        self._queue: deque[int] = deque()
        self._thread = threading.Thread()
        self._is_full = False
        self._enter()
        if sum(self._sizes) > self.max_bytes:
            logger.info(
                "%s: data.cache.max_bytes holds only a part of %s; the rest is not kept", self.root, source.base
            )

    def __reduce__(self) -> tuple[type["ShardCache"], tuple[Any, ...]]:
        return ShardCache, self._arguments

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Bytes of a kept shard, fewer if it is damaged; None if it is not kept (yet)."""
        try:
            return self._files.read(str(self._path(shard)), offset, size)
        except FileNotFoundError:
            self._fetch_later(shard)
        except OSError:
            self.drop(shard)
        return None

    def drop(self, shard: int) -> None:
        """Forget a kept shard that is damaged, and fetch it again."""
        path = self._path(shard)
        with suppress(OSError):
            if self._files.is_at(str(path)):  # another process may have fetched it anew since
                path.unlink()
        self._files.close(str(path))
        self._asked.discard(shard)
        self._fetch_later(shard)

    def _path(self, shard: int) -> Path:
        return self.folder / f"{self._digests[shard]}.tar"

    def _enter(self) -> None:
        """Mark the data set as read by this process and its forks, and clear away what earlier ones left behind."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self.folder.mkdir(mode=0o700, exist_ok=True)
                in_use = _opened(self.folder / IN_USE)
                # Close without unlocking: a forked worker still holds the lock.
                weakref.finalize(self, os.close, in_use)
                if _try_lock(in_use):
                    (self.folder / SAID).unlink(missing_ok=True)
                fcntl.flock(in_use, fcntl.LOCK_SH)
                os.utime(in_use)
                for part in self.folder.glob("*.part"):
                    file = _opened(part)
                    if _try_lock(file):
                        part.unlink()
                    os.close(file)
        except OSError as error:
            raise DistapError(f"{self.root}: data.cache.folder cannot be used: {error.strerror or error}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = _opened(self.root / LOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            _release(file)

    def _fetch_later(self, shard: int) -> None:
        if shard not in self._asked:
            self._asked.add(shard)
            self._queue.append(shard)
        # If the thread is just about to end, the next call starts another.
        if self._queue and not self._is_full and not self._thread.is_alive():
            self._thread = threading.Thread(target=self._fetch_all, name=THREAD, daemon=True)
            self._thread.start()

    def _fetch_all(self) -> None:
        storage = storage_of(self._source.base, self._source.settings)
        storage.meter = self._source.meter
        while self._queue and not self._is_full:
            try:
                self._fetch(self._queue.popleft(), storage)
            except DistapError as error:  # training meets it too if it reads the source there
                logger.warning("data.cache: %s", error)
            except OSError as error:
                self._is_full = True
                self._say_once(f"{self.root}: no more shards are kept: {error.strerror or error}")

    def _fetch(self, shard: int, storage: Storage) -> None:
        """Fetch a shard, unless another process does or there is no room for it."""
        path, size, whole = self._path(shard), self._sizes[shard], False
        part = path.with_suffix(".part")
        with self._locked():
            if path.exists():
                return
            file = _opened(part)
            if not _try_lock(file):
                os.close(file)
                return
        try:
            with self._locked():
                os.ftruncate(file, 0)
                self._is_full = not self._has_room(size)
                if self._is_full:
                    return
                os.posix_fallocate(file, 0, size)  # a full disk is found now
            self._download(shard, storage, file)
            whole = True
        finally:
            with self._locked():
                if whole:
                    part.replace(path)
                else:
                    part.unlink(missing_ok=True)
                _release(file)

    def _download(self, shard: int, storage: Storage, file: int) -> None:
        name, size = self._names[shard], self._sizes[shard]
        with storage.open(name) as opened:
            source = Hashed(opened)
            while source.position <= size and (data := source.read(BLOCK)):
                os.write(file, data)
        if (source.position, source.sha256) != (size, self._digests[shard]):
            raise DistapError(
                f"{storage.where(name)}: its bytes have changed since they were indexed, so it is not kept; make the "
                "index anew with `distap data index`"
            )
        os.fsync(file)

    def _has_room(self, size: int) -> bool:
        """Remove data sets that nobody reads, the oldest first, and return whether that makes enough room."""
        marks = list(self.root.glob(f"{'[0-9a-f]' * 32}/{IN_USE}"))  # other things in the folder are not ours
        used = sum(_used(mark.parent) for mark in marks)
        for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime):
            if used + size <= self.max_bytes:
                break
            in_use = _opened(mark)
            if _try_lock(in_use):
                used -= _used(mark.parent)
                shutil.rmtree(mark.parent)
            os.close(in_use)
        return used + size <= self.max_bytes

    def _say_once(self, message: str) -> None:
        """Warn in the log of one process of the host only."""
        with suppress(OSError):
            os.close(os.open(self.folder / SAID, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            logger.warning("%s; the other shards are read from %s", message, self._source.base)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(file: int) -> None:
    # Unlock before closing: a worker that was forked meanwhile has the file too, and would keep the lock.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _used(folder: Path) -> int:
    used = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            used += path.lstat().st_size
    return used
