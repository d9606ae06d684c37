"""The folder of a run in an object store, or behind another URL that fsspec can write to."""

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsspec.asyn import sync
from fsspec.callbacks import Callback as Progress

from distap.storage.atomic import make_folder, replace_file, sync_path
from distap.storage.remotes import (
    MissingFileError,
    RemoteSettings,
    UnreachableError,
    file_system,
    is_permanent,
    retried,
)
from distap.storage.store_urls import checked_url

KEY = "checkpoint.store"
PART = 16 * 2**20  # bytes of a file that are sent at once
AT_ONCE = 4  # files
T = TypeVar("T")


class Store:
    """Files in a folder behind a URL; any thread of the process that made it may use it.

    Args:
        url: of the folder.
        settings: retries, time-out, and options of the file system.
        key: of the recipe that holds the settings, for messages; none where they are not a recipe's.
    Raises:
        DistapError: the URL is wrong, or a package is not installed.
    """

    def __init__(self, url: str, settings: RemoteSettings, key: str | None = "checkpoint.remote") -> None:
        self.url = checked_url(url)
        self.settings, self.key = settings, key
        scheme = self.url.partition("://")[0]
        self._files = file_system(scheme, settings, key)
        self._is_folder = scheme == "file"
        self._base = str(self._files._strip_protocol(self.url)).rstrip("/")
        self._until = float("inf")
        self._parts = {"chunksize": PART} if scheme in ("s3", "gs") else {}
        self._parts_read = {"chunksize": PART} if scheme == "s3" else {}

    def by(self, until: float) -> "Store":
        """The same store, which fails with what is not done `until` then, on the monotonic clock."""
        bounded = copy.copy(self)
        bounded._until = until
        return bounded

    def where(self, name: str) -> str:
        """URL of a file."""
        return f"{self.url}/{name}"

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each file in a folder and in those below it, by name in the store; none where there is no folder.

        Raises:
            DistapError: it cannot be listed.
        """
        beginning = f"{self._base}/"

        def found() -> dict[str, int]:
            files = self._answer("find", f"{self._base}/{folder}", detail=True)
            within = {str(path).removeprefix(beginning): int(info["size"]) for path, info in files.items()}
            return {name: size for name, size in within.items() if name.startswith(f"{folder}/")}

        try:
            return self._retried(found, folder, "listed")
        except MissingFileError:
            return {}

    def read(self, name: str) -> bytes:
        """A small file."""
        return bytes(self._retried(lambda: self._answer("cat_file", self._path(name)), name, "read"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, which is seen when it is whole and outlasts a loss of power."""

        def written() -> None:
            if self._is_folder:
                replace_file(Path(self._path(name)), data)
            else:
                self._answer("pipe_file", self._path(name), data)

        self._retried(written, name, "written")

    def upload(self, path: Path, name: str) -> None:
        """Send a file of any size; when this returns it outlasts a loss of power."""

        def sent() -> None:
            moved = Progress()
            if self._is_folder:
                self._copy(path, Path(self._path(name)))
                return
            if not self._files.async_impl:
                self._files.put_file(str(path), self._path(name))
                return
            transfer = self._files._put_file(str(path), self._path(name), callback=moved, **self._parts)
            sync(self._files.loop, self._watched, transfer, moved)

        self._retried(sent, name, "written")

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Fetch files of any size into a folder that is there, by the last part of their names.

        Raises:
            MissingFileError: one is not in the store.
            DistapError: one cannot be read, or not be written here.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for fetched in [pool.submit(self._download, name, folder / name.rpartition("/")[2]) for name in names]:
                fetched.result()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, one after the other; those that are gone already are no error."""
        for name in names:
            self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(MissingFileError):
            self._retried(lambda: self._answer("rm_file", self._path(name)), name, "removed")
        if self._is_folder:  # a bucket has none that could stay behind
            with suppress(OSError):
                Path(self._path(name)).parent.rmdir()

    def _copy(self, path: Path, there: Path) -> None:
        make_folder(there.parent)
        self._files.put_file(str(path), str(there))
        sync_path(there)
        sync_path(there.parent)

    def _download(self, name: str, path: Path) -> None:
        def fetched() -> None:
            moved = Progress()
            if not self._files.async_impl:
                self._files.get_file(self._path(name), str(path))
                return
            transfer = self._files._get_file(self._path(name), str(path), callback=moved, **self._parts_read)
            sync(self._files.loop, self._watched, transfer, moved)

        self._retried(fetched, name, "read")

    async def _watched(self, transfer: Coroutine[Any, Any, None], moved: Progress) -> None:
        """Await a transfer for as long as bytes move; how long all of it takes is a matter of its size."""
        task = asyncio.ensure_future(transfer)
        try:
            seen, last = 0, time.monotonic()
            while not task.done():
                await asyncio.wait({task}, timeout=min(1.0, self.settings.timeout_seconds / 10))
                if moved.value != seen:
                    seen, last = moved.value, time.monotonic()
                now = time.monotonic()
                if not task.done() and (now > self._until or now - last > self.settings.timeout_seconds):
                    raise TimeoutError
            task.result()
        finally:
            task.cancel()

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _answer(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the file system returns that moves little."""
        if not self._files.async_impl:
            return getattr(self._files, method)(*arguments, **options)
        asked = getattr(self._files, f"_{method}")
        return sync(self._files.loop, asked, *arguments, timeout=self._patience(), **options)

    def _patience(self) -> float:
        """Seconds that an answer may take."""
        return max(min(self.settings.timeout_seconds, self._until - time.monotonic()), 0.001)

    def _retried(self, call: Callable[[], T], name: str, done: str) -> T:
        def in_time() -> T:
            if time.monotonic() > self._until:
                raise UnreachableError(
                    f"{self.where(name)}: not {done} in time: timeout_seconds is that of a whole checkpoint too"
                )
            return call()

        where = self.where(name)
        return retried(in_time, where, self.settings, is_permanent=is_permanent, done=done, key=self.key)
