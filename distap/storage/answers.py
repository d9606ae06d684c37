"""Bound what web servers and object stores may answer: sizes, packing and redirects, by a middleware of aiohttp."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from fnmatch import fnmatch
from ipaddress import IPv6Address, ip_address
from typing import Any

from aiohttp import ClientRequest, ClientResponse
from yarl import URL

from distap.storage.remotes import AnswerError

MOST_BYTES = 2**26  # of an answer to a request that names no range: listings, metadata and errors
REDIRECTS = (301, 302, 303, 307, 308)  # HTTP statuses
RANGE = re.compile(r"bytes[= ](\d+)-(\d+)(?:/.*)?")  # in a request and, with the whole size, in an answer
REMEDY = "serve the shards with nginx, Apache or an object store, or copy them to disk"
ALLOWED = "DISTAP_REDIRECTS"  # environment: host names or patterns, with commas, that any answer may redirect to
Handler = Callable[[ClientRequest], Awaitable[ClientResponse]]


class BoundedContent:
    """The body of an answer; its reading ends with an AnswerError after `most` bytes."""

    def __init__(self, content: Any, most: int, problem: str) -> None:
        self._content, self._left, self._problem = content, most, problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, size: int = -1) -> bytes:
        if size >= 0:
            return self._counted(await self._content.read(size))
        pieces = [self._counted(await self._content.readany())]
        while pieces[-1]:
            pieces.append(self._counted(await self._content.readany()))
        return b"".join(pieces)

    def _counted(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if self._left < 0:
            raise AnswerError(self._problem)
        return piece


async def bounded(request: ClientRequest, handler: Handler) -> ClientResponse:
    """Refuse, as a middleware of aiohttp, answers that are packed, too long or lead elsewhere."""
    response = await handler(request)
    try:
        if response.status in REDIRECTS:
            await _check_redirect(request.url, response.headers.get("Location", ""))
        response.content = _bounded_content(request, response)  # type: ignore[assignment]
    except BaseException:
        response.close()
        raise
    return response


def _bounded_content(request: ClientRequest, response: ClientResponse) -> BoundedContent:
    packing = response.headers.get("Content-Encoding", "identity")
    if response.status < 300 and packing not in ("identity", "", "aws-chunked"):
        raise AnswerError(f"the server sends packed bytes ({packing}), which were not asked for")
    wanted = RANGE.fullmatch(request.headers.get("Range", ""))
    if wanted is None or response.status >= 300:
        return BoundedContent(response.content, MOST_BYTES, f"the answer has more than {MOST_BYTES:,} bytes")
    first, last = int(wanted[1]), int(wanted[2])
    sent = RANGE.fullmatch(response.headers.get("Content-Range", ""))
    begin = int(sent[1]) if sent else 0
    if begin != first:
        raise AnswerError(f"the server ignores Range and sends bytes from {begin:,}, not {first:,}; {REMEDY}")
    size = min(last, int(sent[2])) - first + 1 if sent else last - first + 1
    longer = f"the server ignores Range and sends more than the {size:,} bytes asked for; {REMEDY}"
    return BoundedContent(response.content, size, longer)


async def _check_redirect(source: URL, location: str) -> None:
    """Raise an AnswerError unless a redirect stays on its host, is allowed, or leads from https to public https."""
    try:
        target = source.join(URL(location))
    except ValueError as error:
        raise AnswerError(f"redirects to what is no URL: {error}") from error
    host = target.host or ""
    if target.scheme not in ("http", "https") or (source.scheme, target.scheme) == ("https", "http"):
        raise AnswerError(f"redirects to {target.scheme}://{host}; expected the same scheme, or https://")
    is_upgrade = target.is_default_port() and source.is_default_port()
    is_same = host == source.host and (target.port == source.port or is_upgrade)
    allowed = os.environ.get(ALLOWED, "").split(",")
    if is_same or any(fnmatch(host, pattern.strip()) for pattern in allowed):
        return
    if source.scheme != "https" or target.scheme != "https" or not await _is_public(host):
        told = f"redirects to {target.origin()}, another or an internal host"
        raise AnswerError(f"{told}; if that is meant, {ALLOWED}={host} in the environment allows it")


async def _is_public(host: str) -> bool:
    """Tell whether all addresses of a host are of the internet, or none is known here, as behind a proxy."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return True
    addresses = [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    inner = [address.ipv4_mapped if isinstance(address, IPv6Address) else None for address in addresses]
    return all((mapped or address).is_global for mapped, address in zip(inner, addresses, strict=True))


def bounded_s3_session() -> type:
    """Return a class of session for aiobotocore, which has no setting for middlewares."""
    from aiobotocore.httpsession import AIOHTTPSession

    class BoundedSession(AIOHTTPSession):
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._middlewares = (bounded,)
            return session

    return BoundedSession
