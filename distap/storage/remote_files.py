"""Files behind http(s)://, s3:// and gs://, through fsspec's file systems."""

import errno
import os
import re
from collections.abc import Callable, Coroutine
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from fsspec.asyn import sync

from distap.errors import DistapError
from distap.storage.locations import joined, scheme_of
from distap.storage.reads import About, Meter, Traffic, whole_file
from distap.storage.remotes import RemoteSettings, file_system, is_permanent, retried

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")
T = TypeVar("T")


class RemoteStorage:
    """Files behind a URL; every process makes its own connections.

    Args:
        base: URL of their folder.
        settings: retries, time-out, and options of the file system.
    """

    def __init__(self, base: str, settings: RemoteSettings) -> None:
        self.base = base
        self.scheme = scheme_of(base)
        self.settings = settings
        self.meter = Meter()
        self._made: tuple[int, Any] | None = None  # process and file system

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def where(self, name: str) -> str:
        """URL of a file."""
        return joined(self.base, quote(name) if self._is_web else name)

    def about(self, name: str) -> About:
        """Size and ETag of a file."""
        if self._is_web:
            return self._retried(name, lambda: self._sync(self._web_range, name, 0, 1))[1]
        info = self._retried(name, lambda: self._sync(self._files._info, self._path(name)))
        if info.get("type") == "directory":
            raise DistapError(f"{self.where(name)}: expected a file, not a folder")
        return About(int(info["size"]), str(info.get("ETag") or info.get("etag") or info.get("LastModified", "")))

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only at the end of the file."""
        if size == 0:
            return b""

        def ranged() -> bytes:
            if self._is_web:
                data, about = self._sync(self._web_range, name, offset, size)
                wanted = min(size, max(about.size - offset, 0))
            else:
                data = self._bucket_range(name, offset, size)
                # A short answer may be the file's end, or one that broke off without contradicting its headers.
                wanted = min(size, max(self._bucket_size(name) - offset, 0)) if len(data) < size else size
            if len(data) > size:
                raise DistapError(self._ignores_ranges(name))
            if len(data) < wanted:
                raise OSError(f"the connection ended after {len(data)} bytes of {wanted}")
            return data

        data = self._retried(name, ranged)
        self.meter.add(Traffic(read_bytes=len(data)))
        return data

    def open(self, name: str) -> BinaryIO:
        """The file from its first byte on."""
        return whole_file(self, name)

    def names(self, pattern: str) -> list[str]:
        """Names of the files that match a glob, sorted."""
        base = joined(self._files._strip_protocol(self.base), "")

        def found() -> list[str]:
            files = self._sync(self._files._glob, base + pattern, detail=True)
            return sorted(path.removeprefix(base) for path, info in files.items() if info["type"] == "file")

        return self._retried(pattern, found)

    def write(self, name: str, data: bytes) -> None:
        """Write a file; a bucket shows it when it is whole."""
        if self._is_web:
            raise DistapError(f"{self.where(name)}: nothing can be written behind {self.scheme}://")
        self._retried(name, lambda: self._sync(self._files._pipe_file, self._path(name), data), "written")

    @property
    def _is_web(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def _files(self) -> Any:
        """The file system of this process: its connections must not be shared by a fork."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), file_system(self.scheme, self.settings)
        return self._made[1]

    def _path(self, name: str) -> str:
        return str(self._files._strip_protocol(self.where(name)))

    def _sync(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        files = self._files
        result: T = sync(files.loop, function, *args, timeout=self.settings.timeout_seconds, **kwargs)
        return result

    def _retried(self, name: str, call: Callable[[], T], done: str = "read") -> T:
        return retried(
            call,
            self.where(name),
            self.settings,
            on_retry=self.meter.add_retry,
            is_permanent=is_permanent,
            done=done,
        )

    def _ignores_ranges(self, name: str) -> str:
        return (
            f"{self.where(name)}: the server sends the whole file where a part is asked for (it ignores Range), so "
            "images cannot be read by their offset; serve the shards with nginx, Apache or an object store, or "
            "copy them to disk"
        )

    def _bucket_range(self, name: str, offset: int, size: int) -> bytes:
        try:
            data: bytes = self._sync(self._files._cat_file, self._path(name), start=offset, end=offset + size)
            return data
        except Exception as error:
            if getattr(error, "errno", None) == errno.EINVAL and "range" in str(error).lower():
                return b""  # beyond the end
            raise

    def _bucket_size(self, name: str) -> int:
        return int(self._sync(self._files._info, self._path(name))["size"])

    async def _web_range(self, name: str, offset: int, size: int) -> tuple[bytes, About]:
        """Part of a file behind a web server, and what its headers say of the whole.

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
