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
from pathlib import Path
from typing import Any

from distap.data.settings import CacheSettings
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.storage.files import BLOCK, Storage, storage_of
from distap.storage.open_files import OpenFiles
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Meter

LOCK, IN_USE, SAID = "lock", "in-use", "said"
THREAD = "distap-shard-cache"  # name of the thread that fetches
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
logger = logging.getLogger("distap")


class ShardCache:
    """The kept shards of one data set; safe to copy into other processes, for one thread of each.

    Args:
        settings: where, and how much.
        index: of the data set.
        base: where its shards come from.
        remote: how that is reached.
        meter: counts the traffic of downloads.
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
            logger.info("%s: data.cache.max_bytes holds a part of %s only; the rest is not kept", self.root, base)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Bytes of a kept shard; None if it is not kept (yet)."""
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
        """Forget a kept shard that is damaged, and fetch it again."""
        process, path = self._of_process(), self._path(shard)
        with suppress(OSError):
            if process.files.is_at(path):  # another process may have fetched it anew since
                Path(path).unlink()
        process.files.close(path)
        process.asked.discard(shard)
        self._fetch_later(shard)

    def _path(self, shard: int) -> str:
        return str(self.folder / f"{self._digests[shard]}.tar")

    def _of_process(self) -> "_Process":
        if self._process is None or self._process.number != os.getpid():
            self._process = self._enter()
        return self._process

    def _enter(self) -> "_Process":
        """Mark the data set as read by this process, and clear away what earlier ones left behind."""
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
            if shard in process.asked or process.is_full:
                return
            process.asked.add(shard)
            process.queue.append(shard)
            if process.thread is None or not process.thread.is_alive():
                process.thread = threading.Thread(target=self._fetch_all, args=(process,), name=THREAD, daemon=True)
                process.thread.start()

    def _fetch_all(self, process: "_Process") -> None:
        storage = storage_of(self._base, self._remote)
        storage.meter = self._meter
        while True:
            with process.lock:
                if not process.queue or process.is_full:
                    process.thread = None
                    return
                shard = process.queue.popleft()
            try:
                process.is_full = not self._fetch(shard, storage)
            except DistapError as error:  # training meets it too if it reads the source there
                logger.warning("data.cache: %s", error)
            except OSError as error:
                process.is_full = True
                self._say_once(f"{self.root}: no more shards are kept: {error.strerror or error}")

    def _fetch(self, shard: int, storage: Storage) -> bool:
        """Fetch a shard unless another process does; False if there is no room for it."""
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
                    _give_up(part, file)
                    return False
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, self._sizes[shard])  # a full disk is found now
            except OSError:
                _give_up(part, file)
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
                f"{storage.where(name)}: its bytes have changed since they were indexed, so it is not kept; make the "
                "index anew with `distap data index`"
            )
        os.fsync(file)

    def _has_room(self, size: int, part: Path) -> bool:
        """Make room by removing data sets that nobody reads, the oldest first; return False if that is not enough."""
        folders = self._folders()
        used = sum(_size(entry) for folder in folders for entry in _files(folder) if entry.path != str(part))
        others = [folder for folder in folders if folder != self.folder]
        for folder in sorted(others, key=lambda folder: (folder / IN_USE).stat().st_mtime):
            if used + size <= self.max_bytes:
                break
            in_use = _opened(folder / IN_USE)
            if _try_lock(in_use):
                used -= sum(_size(entry) for entry in _files(folder))
                shutil.rmtree(folder)
            os.close(in_use)
        return used + size <= self.max_bytes

    def _folders(self) -> list[Path]:
        """The folders of data sets; other things in the cache's folder are not ours."""
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
        """Warn in the log of one process of the host only."""
        with suppress(OSError):
            os.close(os.open(self.folder / SAID, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            logger.warning("%s; the other shards are read from %s", message, self._base)


class _Process:
    """The files and the thread that one process has of the cache."""

    def __init__(self, in_use: int) -> None:
        self.number = os.getpid()
        self.files = OpenFiles()
        self.lock = threading.Lock()
        self.asked: set[int] = set()
        self.queue: deque[int] = deque()
        self.thread: threading.Thread | None = None
        self.is_full = False
        # Close without unlocking: a forked worker still holds the lock.
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
    # Unlock before closing: a worker that was forked meanwhile has the file too, and would keep the lock.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _give_up(part: Path, file: int) -> None:
    part.unlink(missing_ok=True)
    _release(file)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.is_file(follow_symlinks=False)]


def _size(entry: os.DirEntry[str]) -> int:
    """In bytes; 0 if the file was dropped since the folder was listed."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
