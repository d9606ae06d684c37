"""Serve the page of a run that trains, on the standard library alone."""

import json
import signal
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

from markupsafe import Markup

from distap.apps.serve.settings import AddressSettings, url_of
from distap.pages.live import LiveRun
from distap.pages.page import page_text
from distap.telemetry.endpoint import bounded_server
from distap.telemetry.senders import HEADERS, is_foreign, is_own_host
from distap.telemetry.terminal import console

POLICY = "Content-Security-Policy"
SHOWN = {**HEADERS, POLICY: HEADERS[POLICY].replace("blob:", "data:"), "Cache-Control": "no-cache"}
ASSETS = {
    "/style.css": ("text/css", "style.css"),
    "/watch.js": ("text/javascript", "watch.js"),
    "/icon.svg": ("image/svg+xml", "serve.svg"),
}


def watch(folder: Path, settings: AddressSettings) -> None:
    """Show the run in a folder, or the one that will be there, until SIGINT or SIGTERM."""
    live = LiveRun(folder)
    try:
        server = bounded_server(settings.host, settings.port, partial(watch_answer, live, settings))
    except OSError as error:
        raise settings.cannot_listen(error) from error
    with server, suppress(KeyboardInterrupt):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        url = url_of(settings.host, int(server.server_address[1]))
        console.print(f"watching {folder} on {url}", markup=False, soft_wrap=True)
        server.serve_forever()


def watch_answer(
    live: LiveRun, settings: AddressSettings, request: WSGIEnvironment, start: StartResponse
) -> Iterable[bytes]:
    """Answer a request, as a WSGI application, behind the guard of `distap serve`."""
    path = "/" + request.get("PATH_INFO", "/").removeprefix(settings.root).lstrip("/")
    host, others = request.get("HTTP_HOST", "localhost"), settings.allowed_host or ()
    site = None if path == "/" else request.get("HTTP_SEC_FETCH_SITE")  # a link on another site may lead to the page
    status, kind, body = HTTPStatus.OK, "text/plain", ""
    if not is_own_host(host, others):
        status = HTTPStatus.MISDIRECTED_REQUEST
        body = "this server has no such name: start it with --allowed-host NAME"
    elif is_foreign(host, request.get("HTTP_ORIGIN"), site, others):
        status, body = HTTPStatus.FORBIDDEN, "pages of other sites are not answered"
    elif request["REQUEST_METHOD"] != "GET":
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif path == "/":
        shown = live.parts()
        title, parts = shown.pop("title"), {name: (_mark(html), Markup(html)) for name, html in shown.items()}
        kind, body = "text/html", page_text("watch.html", root=settings.root, title=title, parts=parts)
    elif path == "/parts":
        known = parse_qs(request.get("QUERY_STRING", ""))
        fresh = {name: {"mark": _mark(html), "html": html} for name, html in live.parts().items()}
        changed = {name: each for name, each in fresh.items() if known.get(name) != [each["mark"]]}
        kind, body = "application/json", json.dumps(changed)
    elif path in ASSETS:
        kind, body = ASSETS[path][0], page_text(ASSETS[path][1])
    else:
        status, body = HTTPStatus.NOT_FOUND, "unknown path; expected /"
    data = body.encode()
    headers = {**SHOWN, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}
    start(f"{status.value} {status.phrase}", list(headers.items()))
    return [data]


def _mark(html: str) -> str:
    return f"{zlib.crc32(html.encode()):x}"
