"""Files behind http:// and https://, which can be read but not listed or written."""

import re
from urllib.parse import quote

import aiohttp

from distap.errors import DistapError
from distap.storage.files import About, Storage
from distap.storage.locations import joined
from distap.storage.remotes import retried

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


class WebStorage(Storage):
    """The files of a folder on a web server that honours Range requests."""

    def where(self, name: str) -> str:
        return joined(self.base, quote(name))

    @retried("read")
    def about(self, name: str) -> About:
        about: About = self._ask(self._range, name, 0, 1)[1]
        return about

    @retried("read")
    def read(self, name: str, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        data, about = self._ask(self._range, name, offset, size)
        return self._complete(name, data, size, about.size - offset)

    def write(self, name: str, data: bytes) -> None:
        raise DistapError(f"{self.where(name)}: nothing can be written behind {self.scheme}://")

    async def _range(self, name: str, offset: int, size: int) -> tuple[bytes, About]:
        """Return part of a file, and what the headers say about the whole of it.

        fsspec's own `_cat_file` takes a whole file for a part when the server ignores Range.
        """
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
                raise self._ignores_ranges(name)
            if not total or first != str(offset):
                raise aiohttp.ClientPayloadError(f"asked for bytes from {offset}, was sent {said or 'no range'}")
            return await answer.read(), About(int(total), version)
