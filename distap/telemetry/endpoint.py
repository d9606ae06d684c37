"""HTTP endpoint of a rank for metrics, health and readiness, open from early in its start.

| request       | answer                                                                |
|---------------|-----------------------------------------------------------------------|
| GET /metrics  | metrics for Prometheus; 400 by a name of another site (DNS rebinding) |
| GET /healthz  | 200 while the rank can go on; 503 once it has decided to leave after  |
|               | a fault                                                               |
| GET /readyz   | 200 while it trains; 503 before its state is loaded, and once it was  |
|               | asked to stop                                                         |

A rank whose threads all hang answers nothing, which a liveness probe takes for unhealthy. Clients
take nothing from the training but MOST_CLIENTS files and threads, each for REQUEST_SECONDS.
"""

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from ipaddress import ip_address
from socketserver import TCPServer
from threading import BoundedSemaphore, Thread
from typing import Any, cast
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from distap.errors import DistapError, logger
from distap.processes.watchdog import Watchdog

MOST_CLIENTS = 64
# From the start of a connection to the end of its answer; each has one request.
REQUEST_SECONDS = 10.0
# The longest wait for a last scrape; the PodMonitor of k8s/monitoring scrapes every 15 s.
LAST_SCRAPE_SECONDS = 20.0
FOREIGN_HOST = (
    "unknown host; ask by an IP address, localhost, or this host's name (or set metrics.address to"
    " the name)"
)


@dataclass
class Endpoint:
    """HTTP endpoint of one rank. The trainer sets its attributes as they become known."""

    rank: int = 0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    watchdog: Watchdog | None = None
    not_ready: Callable[[], str | None] = lambda: "starting"  # why it does not train now
    address: str = "127.0.0.1"
    # Times of the last two scrapes, by time.monotonic().
    scrapes: deque[float] = field(default_factory=partial(deque, maxlen=2))

    @contextmanager
    def served(self, port: int | None, address: str) -> Iterator["Endpoint"]:
        """Serve http://address:port from a thread while entered; without a port, do nothing."""
        if port is None:
            yield self
            return
        self.address = address
        kind = _IPv6Server if ":" in address else _Server
        try:
            listening = make_server(address, port, self.answer, kind, _RequestHandler)
        except OSError as error:
            raise DistapError(
                "telemetry.cannot_listen",
                f"metrics.port: cannot listen on {address}:{port}: {error.strerror or error};"
                " choose another, or null for none",
            ) from error
        with listening as server:
            Thread(target=server.serve_forever, name="distap-endpoint", daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()

    @contextmanager
    def ready(self, stopping: Callable[[], bool]) -> Iterator[None]:
        """Report the rank as ready while entered and while `stopping` is false."""
        self.not_ready = lambda: "stopping" if stopping() else None
        try:
            yield
        finally:
            self.not_ready = lambda: "finished"

    def wait_for_scrape(self, since: float) -> None:
        """Wait until metrics of after `since` were read, if they are read at a regular interval.

        Else the last figures of a run, such as that it is done, would be lost with its process.
        """
        times = list(self.scrapes)
        if len(times) < 2:
            return
        interval = min(1.25 * (times[1] - times[0]), LAST_SCRAPE_SECONDS)
        until = max(times[1], since) + interval
        while self.scrapes[-1] < since and time.monotonic() < until:
            time.sleep(0.1)

    def answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer an HTTP request as a WSGI application."""
        path = request.get("PATH_INFO", "/")
        if path == "/metrics" and _is_foreign(request.get("HTTP_HOST", "localhost"), self.address):
            status = HTTPStatus.BAD_REQUEST
            content = {"error": FOREIGN_HOST}
        elif path == "/metrics":
            begun = time.monotonic()
            content = make_wsgi_app(self.registry)(request, start)
            self.scrapes.append(begun)
            return cast(Iterable[bytes], content)
        elif path == "/healthz":
            fault = self.watchdog and self.watchdog.verdict
            status, content = self._state("leaving after a fault" if fault else None, "healthy")
            content |= {"fault": fault} if fault else {}
        elif path == "/readyz":
            status, content = self._state(self.not_ready(), "training")
        else:
            status = HTTPStatus.NOT_FOUND
            content = {"error": "unknown path; expected /metrics, /healthz or /readyz"}
        start(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps({"rank": self.rank, **content}).encode() + b"\n"]

    def _state(self, problem: str | None, otherwise: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the answer with the rank's activity, such as `describe of step 12`."""
        content: dict[str, Any] = {"status": problem or otherwise}
        if self.watchdog is not None:
            activity, seconds = self.watchdog.activity
            content |= {"activity": activity, "seconds": round(seconds, 1)}
        return HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK, content


class _Server(ThreadingWSGIServer):
    """prometheus_client's server: one thread per connection, so that none delays probes."""

    # With the usual 5, many connections at a time make a probe wait for seconds.
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._places = BoundedSemaphore(MOST_CLIENTS)
        self._begun: dict[socket.socket, float] = {}  # when each connection began, the oldest first
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a place for a new connection; if all are taken, cut off the oldest connection."""
        has_place = self._places.acquire(blocking=False)
        if not has_place:
            for oldest in list(self._begun)[:1]:
                _cut_off(oldest)
            has_place = self._places.acquire(timeout=1.0)
        if has_place:
            self._begun[request] = time.monotonic()
        return has_place

    def service_actions(self) -> None:
        """Cut off the connections whose time is over, twice a second."""
        for request, begun in list(self._begun.items()):
            if time.monotonic() - begun > REQUEST_SECONDS:
                _cut_off(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and give its place back, at the end of its thread."""
        super().shutdown_request(request)
        if self._begun.pop(request, None) is not None:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s was broken off", client_address, exc_info=True)

    def server_bind(self) -> None:
        # The base class asks the name service for this host's name, and it may not answer.
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _RequestHandler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because probes come every few seconds."""


def _cut_off(connection: socket.socket) -> None:
    """End what a thread waits for at a connection, which the thread then closes."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


@cache
def _own_names() -> tuple[str, str]:
    """Return the names of this host, which the name service may take its time to look up."""
    return socket.gethostname().lower(), socket.getfqdn().lower()


def _is_foreign(host: str, address: str) -> bool:
    """Return whether the header Host may be the domain of a page that made it point here.

    Such a page would read the metrics in a browser (DNS rebinding).
    No page can do so with an IP address, or with a name without a dot, such as those of services in
    compose.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return True
    with suppress(ValueError):
        ip_address(name)
        return False
    return "." in name and name not in (address.lower(), *_own_names())
