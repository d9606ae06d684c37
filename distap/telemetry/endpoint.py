"""The HTTP endpoint of a rank: metrics, health, readiness and traces, from early in its start.

| request               | answer                                                                                    |
|-----------------------|-------------------------------------------------------------------------------------------|
| GET /metrics          | metrics for Prometheus                                                                    |
| GET /healthz          | 200 while the rank can go on; 503 once it has decided to leave after a fault              |
| GET /readyz           | 200 while it trains; 503 before its state is loaded, and once it was asked to stop        |
| POST /trace?steps=N   | 202: every rank writes a trace of the next N steps; 403 to all but this host              |

A request that a page of another site makes a browser send is answered with 403.

A rank whose threads all hang answers nothing, which a liveness probe takes for unhealthy.
"""

import errno
import hashlib
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import Any, cast
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from distap.errors import DistapError
from distap.processes.watchdog import Watchdog
from distap.telemetry.senders import is_foreign, is_own_host
from distap.telemetry.tracing import MOST_STEPS, STEPS

MOST_CONNECTIONS = 32
MOST_PORTS = 100  # that are tried
REQUEST_SECONDS = 10.0  # in which a client has to send its request and take the answer
logger = logging.getLogger("distap")


@dataclass
class Endpoint:
    """The endpoint of one rank. The trainer fills in its attributes as they become known."""

    rank: int = 0
    run: str = ""  # its `run_key`
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    watchdog: Watchdog | None = None
    not_ready: Callable[[], str | None] = lambda: "starting"  # why it does not train now
    ask_trace: Callable[[int], None] = lambda steps: None

    @contextmanager
    def served(self, port: int | None, address: str) -> Iterator["Endpoint"]:
        """Serve http://address:port from a thread while this is entered; without a port, serve nothing.

        A port that another process has is passed over, with a warning that names the one that is taken instead.
        """
        if port is None:
            yield self
            return
        with self._listening(port, address) as server:
            Thread(target=server.serve_forever, name="distap-endpoint", daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()

    def _listening(self, first: int, address: str) -> TCPServer:
        for port in range(first, first + MOST_PORTS):
            try:
                server = bounded_server(address, port, self.answer)
            except (OSError, OverflowError) as error:
                problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                if getattr(error, "errno", None) != errno.EADDRINUSE:
                    break
            else:
                if port != first:
                    logger.warning("metrics.port: %s:%d is taken, so this rank is at %d", address, first, port)
                return server
        raise DistapError(
            f"metrics.port: cannot listen on {address}:{first}: {problem}; choose another, or null for none"
        )

    @contextmanager
    def ready(self, stopping: Callable[[], bool]) -> Iterator[None]:
        """Report the rank as ready while this is entered and `stopping` is false."""
        self.not_ready = lambda: "stopping" if stopping() else None
        try:
            yield
        finally:
            self.not_ready = lambda: "finished"

    def answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer a request, as a WSGI application."""
        path, is_post = request.get("PATH_INFO", "/"), request["REQUEST_METHOD"] == "POST"
        host = request.get("HTTP_HOST", "localhost")
        if is_foreign(host, request.get("HTTP_ORIGIN"), request.get("HTTP_SEC_FETCH_SITE")):
            status, content = HTTPStatus.FORBIDDEN, {"error": "pages of other sites are not answered"}
        elif path == "/metrics":
            return cast(Iterable[bytes], make_wsgi_app(self.registry)(request, start))
        elif path == "/trace":
            status, content = self._traced(request) if is_post else (HTTPStatus.METHOD_NOT_ALLOWED, {})
        elif path == "/healthz":
            status, content = self._health()
        elif path == "/readyz":
            status, content = self._said(self.not_ready(), "training")
        else:
            status = HTTPStatus.NOT_FOUND
            content = {"error": "unknown path; expected /metrics, /healthz, /readyz or POST /trace?steps=N"}
        body = json.dumps({"rank": self.rank, **({"run": self.run} if self.run else {}), **content}).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "POST"))
        start(f"{status.value} {status.phrase}", headers)
        return [body]

    def _health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        fault = self.watchdog and self.watchdog.verdict
        status, content = self._said("leaving after a fault" if fault else None, "healthy")
        return status, content | ({"fault": fault} if fault else {})

    def _said(self, problem: str | None, otherwise: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """Answer with what the rank does, such as `describe of step 12`, and for how many seconds."""
        content: dict[str, Any] = {"status": problem or otherwise}
        if self.watchdog is not None:
            activity, seconds = self.watchdog.activity
            content |= {"activity": activity, "seconds": round(seconds, 1)}
        return HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK, content

    def _traced(self, request: WSGIEnvironment) -> tuple[HTTPStatus, dict[str, Any]]:
        client = ipaddress.ip_address(request["REMOTE_ADDR"])
        mapped = client.ipv4_mapped if isinstance(client, ipaddress.IPv6Address) else None
        if not ((mapped or client).is_loopback and is_own_host(request.get("HTTP_HOST", "localhost"))):
            error = "ask for traces from this host; kubectl port-forward counts as this host"
            return HTTPStatus.FORBIDDEN, {"error": error}
        given = parse_qs(request.get("QUERY_STRING", "")).get("steps", [str(STEPS)])[-1]
        steps = int(given) if given.isdecimal() and len(given) < 4 else 0
        if not 1 <= steps <= MOST_STEPS:
            return HTTPStatus.BAD_REQUEST, {"error": f"steps is {given!r}, not a number from 1 to {MOST_STEPS}"}
        reason = self.not_ready()
        if reason:
            return HTTPStatus.CONFLICT, {"error": f"there are no steps to trace: {reason}"}
        self.ask_trace(steps)
        told = f"every rank traces {steps} steps, from the next one on, or behind a trace that is under way"
        return HTTPStatus.ACCEPTED, {"status": told}


def bounded_server(address: str, port: int, application: WSGIApplication) -> TCPServer:
    """Listen on address:port for a WSGI application, or raise OSError; connections are few and short."""
    return make_server(address, port, application, _IPv6Server if ":" in address else _Server, _SilentHandler)


def run_key(folder: Path) -> str:
    """A name that tells a run from the others on this machine, without the path of its folder."""
    path = folder.resolve()
    return f"{path.name}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"


class _Server(ThreadingWSGIServer):
    """Runs a thread for each connection, so that a slow client delays no probe, and bounds their number and age."""

    request_queue_size = 128  # with the usual 5, many connections at a time make a probe wait for seconds

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._since: dict[socket.socket, float] = {}  # of open connections, the oldest first
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        # The oldest one gives way, so that a probe is answered whatever others leave open.
        if len(self._since) >= MOST_CONNECTIONS:
            self._end(next(iter(list(self._since))))
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:  # twice a second
        oldest = time.monotonic() - REQUEST_SECONDS
        for request in [request for request, since in list(self._since.items()) if since < oldest]:
            self._end(request)

    def close_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().close_request(request)

    def _end(self, request: socket.socket) -> None:
        """Wake the thread of a connection, which then closes it."""
        self._since.pop(request, None)
        with suppress(OSError):  # it has just closed it
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s was broken off", client_address, exc_info=True)

    def server_bind(self) -> None:
        # The base class asks the name service for this host's name, and it may not answer.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass  # probes come every few seconds
