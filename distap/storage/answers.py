"""Bound the answers of web servers and object stores: a middleware of aiohttp checks them."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

from aiohttp import ClientRequest, ClientResponse
from yarl import URL

from distap.errors import AnswerError

MOST_BYTES = 2**26  # of an answer to a request that names no range: listings, metadata and errors
REDIRECTS = (301, 302, 303, 307, 308)  # HTTP statuses
# In a request and, with the whole size, in an answer.
RANGE = re.compile(r"bytes[= ](\d+)-(\d+)(?:/.*)?")
REMEDY = "serve the shards with nginx, Apache or an object store, or copy them to disk"
# In the environment: names of hosts, with commas, that any answer may redirect to.
ALLOWED = "DISTAP_REDIRECTS"
Handler = Callable[[ClientRequest], Awaitable[ClientResponse]]


class BoundedContent:
    """The body of an answer; reading raises an AnswerError after `limit` bytes."""

    def __init__(self, content: Any, limit: int, problem: str) -> None:
        self._content = content
        self._left = limit
        self._problem = problem

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
            raise AnswerError("storage.bad_answer", self._problem)
        return piece


async def bounded(request: ClientRequest, handler: Handler) -> ClientResponse:
    """Refuse, as a middleware of aiohttp, answers that are packed, too long or lead elsewhere."""
    response = await handler(request)
    try:
        if response.status in REDIRECTS:
            # aiohttp follows the old header too.
            location = response.headers.get("Location") or response.headers.get("URI") or ""
            await _check_redirect(request.url, location)
        response.content = _bounded_content(request, response)  # type: ignore[assignment]
    except BaseException:
        response.close()
        raise
    return response


def _bounded_content(request: ClientRequest, response: ClientResponse) -> BoundedContent:
    packing = response.headers.get("Content-Encoding", "identity")
    if response.status < 300 and packing not in ("identity", "", "aws-chunked"):
        raise AnswerError(
            "storage.bad_answer",
            f"the server sends packed bytes ({packing}), which were not asked for",
        )
    wanted = RANGE.fullmatch(request.headers.get("Range", ""))
    if wanted is None or response.status >= 300:
        return BoundedContent(
            response.content, MOST_BYTES, f"the answer has more than {MOST_BYTES:,} bytes"
        )
    first = int(wanted[1])
    last = int(wanted[2])
    sent = RANGE.fullmatch(response.headers.get("Content-Range", "")) or ("", "0", last)
    if int(sent[1]) != first:
        raise AnswerError(
            "storage.bad_answer",
            f"the server ignores Range and sends bytes from {sent[1]}, not {first}; {REMEDY}",
        )
    size = min(last, int(sent[2])) - first + 1
    return BoundedContent(
        response.content,
        size,
        f"the server ignores Range and sends more than the {size:,} bytes asked for; {REMEDY}",
    )


async def _check_redirect(source: URL, location: str) -> None:
    """Raise an AnswerError unless a redirect stays on its host, is allowed, or is public.

    Public is https:// on the internet.
    """
    try:
        target = source.join(URL(location))
        is_same = target.origin() == source.origin()
    except ValueError as error:
        raise AnswerError(
            "storage.bad_redirect",
            f"redirects to {location[:200]!r}, which is no URL of a web server",
        ) from error
    host = target.host or ""
    if is_same or host in os.environ.get(ALLOWED, "").split(","):
        return
    if target.scheme != "https" or not (host == source.host or await _is_public(host)):
        raise AnswerError(
            "storage.bad_redirect",
            f"redirects to {target.origin()}, another or an internal host, or one without"
            f" encryption; if that is meant, {ALLOWED}={host} in the environment allows it",
        )


async def _is_public(host: str) -> bool:
    """Return whether all addresses of a host are of the internet.

    Behind a proxy no address may be known here.
    """
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return True
    return all(ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in entries)


def bounded_s3_session() -> type:
    """Return a class of session for aiobotocore, which has no setting for middlewares."""
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class BoundedSession(AIOHTTPSession):
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._middlewares = (bounded,)
            return session

    return BoundedSession
