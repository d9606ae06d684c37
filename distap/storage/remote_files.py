"""Files behind http(s)://, s3://, gs:// and the other URLs that fsspec has a file system for."""

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar
from urllib.parse import quote

import fsspec
from fsspec.asyn import sync
from fsspec.callbacks import Callback as Progress
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from distap.errors import DistapError
from distap.storage.files import About, Storage
from distap.storage.locations import joined, scheme_of
from distap.storage.remotes import EXTRAS, RemoteSettings

PART = 16 * 2**20  # bytes of a large file that are sent at once
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")
T = TypeVar("T")


class RemoteStorage(Storage):
    """The files behind a URL; every process makes its own connections. See `Storage` for the arguments."""

    def __init__(self, base: str, settings: RemoteSettings | None = None, key: str | None = "data.remote") -> None:
        super().__init__(base, settings, key)
        self.scheme = scheme_of(base)
        self._is_web = self.scheme in ("http", "https")
        self._made: tuple[int, Any] | None = None  # process and its file system

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def where(self, name: str) -> str:
        return joined(self.base, quote(name) if self._is_web else name)

    def _about(self, name: str) -> About:
        if self._is_web:
            return self._ask(self._web_range, name, 0, 1)[1]
        info = self._ask(self._files._info, self._path(name))
        if info.get("type") == "directory":
            raise DistapError(f"{self.where(name)}: expected a file, not a folder")
        return About(int(info["size"]), str(info.get("ETag") or info.get("etag") or info.get("LastModified", "")))

    def _read(self, name: str, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        if self._is_web:
            data, about = self._ask(self._web_range, name, offset, size)
            wanted = min(size, max(about.size - offset, 0))
        else:
            data = self._bucket_range(name, offset, size)
            # A short answer is the end of the file, or one that broke off without contradicting its headers.
            wanted = min(size, max(self._about(name).size - offset, 0)) if len(data) < size else size
        if len(data) > size:
            raise DistapError(self._ignores_ranges(name))
        if len(data) < wanted:
            raise OSError(f"the connection ended after {len(data)} bytes of {wanted}")
        return data

    def _read_whole(self, name: str) -> bytes:
        return bytes(self._ask(self._files._cat_file, self._path(name)))

    def _names(self, pattern: str) -> Iterable[str]:
        base = joined(self._files._strip_protocol(self.base), "")
        files = self._ask(self._files._glob, base + pattern, detail=True)
        return (path.removeprefix(base) for path, info in files.items() if info["type"] == "file")

    def _sizes(self, folder: str) -> dict[str, int]:
        base = joined(self._files._strip_protocol(self.base), "")
        files = self._ask(self._files._find, base + folder, detail=True)
        sizes = {str(path).removeprefix(base): int(info["size"]) for path, info in files.items()}
        return {name: size for name, size in sizes.items() if name.startswith(f"{folder}/")}

    def _write(self, name: str, data: bytes) -> None:
        if self._is_web:
            raise DistapError(f"{self.where(name)}: nothing can be written behind {self.scheme}://")
        self._ask(self._files._pipe_file, self._path(name), data)

    def _upload(self, path: Path, name: str) -> None:
        parts = {"chunksize": PART} if self.scheme in ("s3", "gs") else {}
        self._transfer(self._files._put_file, str(path), self._path(name), **parts)

    def _download(self, name: str, path: Path) -> None:
        parts = {"chunksize": PART} if self.scheme == "s3" else {}
        self._transfer(self._files._get_file, self._path(name), str(path), **parts)

    def _remove(self, name: str) -> None:
        self._ask(self._files._rm_file, self._path(name))

    @property
    def _files(self) -> Any:
        """The file system of this process: a fork must not use the connections of its parent."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), _file_system(self.scheme, self.settings, self.key)
        return self._made[1]

    def _path(self, name: str) -> str:
        return str(self._files._strip_protocol(self.where(name)))

    def _ask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any) -> T:
        """Return the answer to a request that moves little data."""
        patience = max(min(self.settings.timeout_seconds, self._deadline - time.monotonic()), 0.001)
        answer: T = sync(self._files.loop, function, *args, timeout=patience, **options)
        return answer

    def _transfer(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any, **options: Any) -> None:
        """Await a transfer for as long as bytes move: how long all of it takes depends on its size."""
        # A file system without coroutines need not report progress, so it is given all the time there is.
        limit = float("inf") if isinstance(self._files, AsyncFileSystemWrapper) else self.settings.timeout_seconds
        moved = Progress()

        async def watched() -> None:
            task = asyncio.ensure_future(function(*args, callback=moved, **options))
            try:
                seen, last = 0, time.monotonic()
                while not task.done():
                    await asyncio.wait({task}, timeout=min(1.0, limit / 10))
                    if moved.value != seen:
                        seen, last = moved.value, time.monotonic()
                    now = time.monotonic()
                    if not task.done() and (now > self._deadline or now - last > limit):
                        raise TimeoutError
                task.result()
            finally:
                task.cancel()

        sync(self._files.loop, watched)

    def _ignores_ranges(self, name: str) -> str:
        return (
            f"{self.where(name)}: the server sends the whole file where a part is asked for (it ignores Range), so "
            "images cannot be read by their offset; serve the shards with nginx, Apache or an object store, or "
            "copy them to disk"
        )

    def _bucket_range(self, name: str, offset: int, size: int) -> bytes:
        try:
            return bytes(self._ask(self._files._cat_file, self._path(name), start=offset, end=offset + size))
        except Exception as error:
            if getattr(error, "errno", None) == errno.EINVAL and "range" in str(error).lower():
                return b""  # beyond the end
            raise

    async def _web_range(self, name: str, offset: int, size: int) -> tuple[bytes, About]:
        """Return part of a file on a web server, and what the headers say about the whole file.

        fsspec's own `_cat_file` takes a whole file for a part when the server ignores Range.
        """
        import aiohttp

        files = self._files
        session = await files.set_session()
        options = dict(files.kwargs)
        headers = {
            **options.pop("headers", {}),
            "Range": f"bytes={offset}-{offset + size - 1}",
            "Accept-Encoding": "identity",
        }
        async with session.get(files.encode_url(self.where(name)), headers=headers, **options) as answer:
            if answer.status == 404:
                raise FileNotFoundError(self.where(name))
            said = answer.headers.get("Content-Range", "")
            match = _CONTENT_RANGE.fullmatch(said)
            first, total = match.groups() if match else ("", "")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
            if answer.status == 416 and total:
                return b"", About(int(total), version)
            answer.raise_for_status()
            if answer.status != 206:
                raise DistapError(self._ignores_ranges(name))
            if not total or first != str(offset):
                raise aiohttp.ClientPayloadError(f"asked for bytes from {offset}, was sent {said or 'no range'}")
            return await answer.read(), About(int(total), version)


def _file_system(scheme: str, settings: RemoteSettings, key: str | None) -> Any:
    """Make an fsspec file system with connections of its own, which retries nothing itself.

    Raises:
        DistapError: its package is not installed, or an option is wrong.
    """
    options = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in settings.options.get(scheme, {}).items()
    }
    if scheme == "s3":
        # One attempt of boto's is one of ours; that of s3fs itself is set below.
        client = {"retries": {"total_max_attempts": 1}, "read_timeout": settings.timeout_seconds}
        options["config_kwargs"] = {**client, **options.get("config_kwargs", {})}
    if scheme == "gs":
        # gcsfs asks over gRPC for zonal buckets, which hangs in processes that were forked after its first use.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        remedy = f": pip install 'distap[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise DistapError(f"{scheme}:// needs a package that is not installed ({error}){remedy}") from error
    except Exception as error:
        where = f"{key}.options.{scheme}" if key else f"{scheme}://"
        raise DistapError(f"{where}: {error}; see fsspec's file system for what it takes") from error
    if scheme == "s3":
        files.retries = 1
    if scheme == "gs":
        # gcsfs wraps six attempts with pauses around each request, and no option takes them away.
        files._request = MethodType(type(files)._request.__wrapped__, files)
    return files if files.async_impl else AsyncFileSystemWrapper(files, asynchronous=False)
