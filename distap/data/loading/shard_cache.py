"""Cache shards on a host's own disk, shared by its ranks and loader workers.

    FOLDER/FINGERPRINT/SHA256/shard.tar   a whole shard
    FOLDER/FINGERPRINT/SHA256/lock        held by the process that fetches it

Reading never waits for a download: a shard that is not there yet is read from its source, while a thread of one
process fetches it. Nothing is evicted: what does not fit is always read from the source, since a training reads
images in random order and would soon want each shard again.
"""

import errno
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from distap.data.pixel_and_cache_settings import CacheSettings
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.storage.atomic import BusyError, locked, replacing
from distap.storage.files import REQUEST_BYTES, Storage
from distap.storage.hashing import Hashed

THREAD = "distap-shard-cache"  # name of the thread that fetches
logger = logging.getLogger("distap")


class ShardCache:
    """Shards of a data set, cached on disk; safe to copy into other processes, for one thread in each."""

    def __init__(self, settings: CacheSettings, index: Index, source: Storage) -> None:
        self._arguments = settings, index, source
        self._source, self.root, self.max_bytes = source, Path(settings.folder), settings.max_bytes
        self.folder = self.root / index.fingerprint[:32]
        self._shards = list(zip(index.shard_name, index.shard_size, index.shard_sha256, strict=True))
        self._asked: set[int] = set()
        self._queue: deque[int] = deque()
        self._thread = threading.Thread()
        self._is_full = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DistapError(f"{self.root}: data.cache.folder cannot be used: {error.strerror or error}") from error

    def __reduce__(self) -> tuple[type["ShardCache"], tuple[Any, ...]]:
        return ShardCache, self._arguments

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Return bytes of a cached shard, fewer if it was cut short; None if it is not cached (yet)."""
        try:
            with self._path(shard).open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size)
        except OSError:
            self._fetch_later(shard)
            return None

    def drop(self, shard: int) -> None:
        """Remove a damaged shard from the cache, and fetch it again."""
        self._path(shard).unlink(missing_ok=True)
        self._asked.discard(shard)
        self._fetch_later(shard)

    def _path(self, shard: int) -> Path:
        return self.folder / str(self._shards[shard][2]) / "shard.tar"

    def _fetch_later(self, shard: int) -> None:
        if shard not in self._asked:
            self._asked.add(shard)
            self._queue.append(shard)
        # If the thread is just about to end, the next call starts another.
        if self._queue and not self._is_full and not self._thread.is_alive():
            self._thread = threading.Thread(target=self._fetch_all, name=THREAD, daemon=True)
            self._thread.start()

    def _fetch_all(self) -> None:
        while self._queue and not self._is_full:
            try:
                self._fetch(self._queue.popleft())
            except DistapError as error:  # training meets it too if it reads the source there
                logger.warning("data.cache: %s", error)
            except OSError as error:
                self._is_full = True
                reason = error.strerror or error
                logger.warning(
                    "%s: no more shards are kept: %s; the others are read from the source", self.root, reason
                )

    def _fetch(self, shard: int) -> None:
        """Fetch a shard, unless another process is fetching it or has fetched it."""
        path = self._path(shard)
        with suppress(BusyError), locked(path.parent, "fetching"):
            if not path.exists():
                for left in path.parent.glob(".*.tmp"):  # by a process that was killed
                    left.unlink()
                with replacing(path) as file:
                    self._download(shard, file)

    def _download(self, shard: int, file: Any) -> None:
        name, size, sha256 = self._shards[shard]
        used = 0
        for path in self.root.rglob("*.tar*"):  # also of earlier versions, and of downloads that were killed
            with suppress(FileNotFoundError):  # another process has just renamed it
                used += path.stat().st_size
        if used + size > self.max_bytes:
            raise OSError(
                errno.ENOSPC, f"data.cache.max_bytes is {self.max_bytes}, and {used} bytes are kept already"
            )
        os.posix_fallocate(file.fileno(), 0, int(size))  # a full disk is found now
        with self._source.open(str(name)) as opened:
            source = Hashed(opened)
            while source.position < size and (data := source.read(min(REQUEST_BYTES, int(size) - source.position))):
                file.write(data)
        if (source.position, source.sha256) != (size, sha256):
            raise DistapError(
                f"{self._source.where(str(name))}: its bytes have changed since they were indexed; make the index "
                "anew with `distap data index`"
            )
