"""Keep whole files of a store on this host's disk, named by their SHA-256, within some bytes.

Several processes of several trainings may share a folder. All that they agree on are files in it:

    <sha256>          a file that is whole, and was compared with its SHA-256
    <sha256>.part     one that is being written; its writer holds a lock of it
    <sha256>.refused  the store has other bytes than these, so no one tries again
    <name>.owner      a process that will need files; it holds a lock of it as long as it lives
    <name>.wanted     the SHA-256 of these files, the next one first
    .room             its lock is held while room is made

The kernel releases the locks of a process that is killed, so nothing has to be cleaned up: a part
without a lock is written anew, and an owner without one is gone.
"""

import fcntl
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from pydantic import PositiveInt

from distap.errors import DistapError, logger

SHA256_LETTERS = 64
PART_SUFFIX = ".part"
REFUSED_SUFFIX = ".refused"
OWNER_SUFFIX = ".owner"
WANTED_SUFFIX = ".wanted"
NEW_SUFFIX = ".new"
NEVER = 2**62  # place of a file that no one wants
Blocks = Callable[[], Iterator[bytes]]  # reads a file of the store


@dataclass(frozen=True)
class CacheSettings:
    """Choose where a host keeps shards of a store, and how many bytes of them."""

    folder: Path
    """Folder on this host's own disk; all ranks of the host, and other trainings, may share it."""
    bytes: PositiveInt
    """Keep at most this many bytes of shards in the folder. Those that the plan of batches needs
    last make room for others."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section


class FileCache:
    """Files of at most `limit` bytes in all, in a folder on this host's disk.

    Raises:
        DistapError: nothing can be written into the folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder.expanduser()
        self.limit = limit
        self._warned = set[str]()  # of which errors of the disk
        self._owner: BinaryIO | None = None
        self._wanted = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._room():
                for refused in self.folder.glob(f"*{REFUSED_SUFFIX}"):
                    refused.unlink(missing_ok=True)
        except OSError as error:
            raise DistapError(
                "storage.cannot_write",
                f"data.cache.folder: {folder}: cannot be used: {error.strerror or error}; name a"
                " folder on this host's own disk",
            ) from error

    def has(self, sha256: str) -> bool:
        return (self.folder / sha256).exists()

    def open(self, sha256: str) -> BinaryIO | None:
        """Open a file if it is here. It can be read to its end, also once it has been removed."""
        try:
            return (self.folder / sha256).open("rb", buffering=0)
        except OSError:
            return None

    def fetch(self, sha256: str, size: int, blocks: Blocks, name: str = "a file") -> bool:
        """Fetch a file of `size` bytes unless it is here; return whether it is.

        Another process that writes it is waited for. False says that the folder has no room for it
        next to files that are wanted sooner, or that the store has other bytes. `name` is that of
        the file, for messages.

        Raises:
            DistapError: the store cannot be read.
        """
        if self.has(sha256):
            return True
        if (self.folder / f"{sha256}{REFUSED_SUFFIX}").exists():
            return False
        try:
            with self._part(sha256) as part:
                if self.has(sha256):
                    self._remove_part(sha256)
                    return True
                if not self._has_room(sha256, size, part):
                    return False
                return self._write(sha256, part, blocks, name)
        except OSError as error:
            self._warn_of_disk(error)
            return False

    def want(self, files: Sequence[str]) -> None:
        """Tell the other owners which files this process needs, the next one first.

        These are removed last, as long as this process lives.
        """
        text = "\n".join(files)
        if text == self._wanted:
            return
        try:
            if self._owner is None:
                with self._room():  # or another process takes it for that of a dead one
                    # A random name: processes of two containers may have the same number.
                    owner = self.folder / f"{uuid.uuid4().hex}{OWNER_SUFFIX}"
                    self._owner = owner.open("xb")
                    fcntl.flock(self._owner, fcntl.LOCK_EX)
            wanted = Path(self._owner.name).with_suffix(WANTED_SUFFIX)
            # Not synced, unlike `write_whole`: after a loss of power no owner lives.
            wanted.with_suffix(NEW_SUFFIX).write_text(text)
            wanted.with_suffix(NEW_SUFFIX).replace(wanted)
            self._wanted = text
        except OSError as error:
            self._warn_of_disk(error)

    def close(self) -> None:
        """Want no files any more; the end of the process does the same."""
        if self._owner is not None:
            self._owner.close()

    def discard(self, sha256: str, file: BinaryIO) -> None:
        """Remove an opened file, whose bytes have changed on this host's disk."""
        with suppress(OSError), self._room():
            if (self.folder / sha256).stat().st_ino == os.fstat(file.fileno()).st_ino:
                (self.folder / sha256).unlink()

    @contextmanager
    def _part(self, sha256: str) -> Iterator[BinaryIO]:
        """Open the part of a file, once no other process writes it."""
        path = self.folder / f"{sha256}{PART_SUFFIX}"
        while True:
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as part:
                fcntl.flock(part, fcntl.LOCK_EX)
                # The process that had the lock may have renamed or removed the file meanwhile.
                is_part = False
                with suppress(FileNotFoundError):
                    is_part = path.stat().st_ino == os.fstat(part.fileno()).st_ino
                if is_part:
                    with _unlocked_after(part):
                        yield part
                    return

    def _has_room(self, sha256: str, size: int, part: BinaryIO) -> bool:
        """Reserve room for a file in its part; remove files that are wanted later, if necessary."""
        with self._room():
            places = self._places()
            excess = self._used() + size - self.limit - os.fstat(part.fileno()).st_size
            place = places.get(sha256, NEVER - 1)
            # Files that are here are removed under the lock of room alone.
            later = {
                path: path.stat().st_size
                for path in self.folder.iterdir()
                if len(path.name) == SHA256_LETTERS and places.get(path.name, NEVER) > place
            }
            if excess > sum(later.values()):
                self._remove_part(sha256)
                return False
            last_first = sorted(later, key=lambda path: -places.get(path.name, NEVER))
            for path in last_first:
                if excess <= 0:
                    break
                excess -= later[path]
                path.unlink()
            try:
                part.truncate(0)
                os.posix_fallocate(part.fileno(), 0, size)
            except OSError:
                self._remove_part(sha256)
                raise
        return True

    def _write(self, sha256: str, part: BinaryIO, blocks: Blocks, name: str) -> bool:
        """Write the store's file into its part, and give it its name if the SHA-256 is right."""
        try:
            for _ in range(2):  # a network may change bytes on their way
                digest = hashlib.sha256()
                part.seek(0)
                for block in blocks():
                    digest.update(block)
                    part.write(block)
                # Not synced: a file that loses bytes with the power fails the CRC of its images.
                part.flush()
                if digest.hexdigest() == sha256:
                    (self.folder / f"{sha256}{PART_SUFFIX}").rename(self.folder / sha256)
                    return True
        except BaseException:
            self._remove_part(sha256)
            raise
        self._remove_part(sha256)
        (self.folder / f"{sha256}{REFUSED_SUFFIX}").touch()
        logger.warning(
            "data.cache: %s in the store differs from the index: its SHA-256 is not %s; its images"
            " are read and compared one by one: find out more by `distap data check`",
            name,
            sha256,
        )
        return False

    def _remove_part(self, sha256: str) -> None:
        (self.folder / f"{sha256}{PART_SUFFIX}").unlink(missing_ok=True)

    @contextmanager
    def _room(self) -> Iterator[None]:
        with (self.folder / ".room").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with _unlocked_after(lock):
                yield

    def _used(self) -> int:
        """Return the bytes of all files and parts; remove parts that a killed process has left."""
        used = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                is_part = path.suffix == PART_SUFFIX
                if len(path.stem) == SHA256_LETTERS and not (is_part and _removed_if_free(path)):
                    used += path.stat().st_size
        return used

    def _places(self) -> dict[str, int]:
        """Return the place of each file among those that a living owner wants, the soonest one."""
        places = dict[str, int]()
        for owner in self.folder.glob(f"*{OWNER_SUFFIX}"):
            wanted = owner.with_suffix(WANTED_SUFFIX)
            if _removed_if_free(owner):
                wanted.unlink(missing_ok=True)
                wanted.with_suffix(NEW_SUFFIX).unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):
                for place, sha256 in enumerate(wanted.read_text().split()):
                    places[sha256] = min(place, places.get(sha256, place))
        return places

    def _warn_of_disk(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if reason not in self._warned:
            logger.warning(
                "data.cache.folder: %s: %s; shards that cannot be kept there are read from the"
                " store image by image: make room, or lower data.cache.bytes",
                self.folder,
                reason,
            )
        self._warned.add(reason)


@contextmanager
def _unlocked_after(file: IO[bytes]) -> Iterator[None]:
    """Give a file's lock back at the end, also if a process was forked that has the file too."""
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _removed_if_free(path: Path) -> bool:
    """Remove a file unless a living process holds its lock; return whether it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # With the lock: who waits for it looks again whether the file is still there.
            path.unlink()
    except BlockingIOError:
        return False
    return True
