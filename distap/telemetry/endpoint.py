"""HTTP endpoint of a rank for metrics, health and readiness, open from early in its start.

| request       | answer                                                                             |
|---------------|------------------------------------------------------------------------------------|
| GET /metrics  | metrics for Prometheus                                                             |
| GET /healthz  | 200 while the rank can go on; 503 once it has decided to leave after a fault       |
| GET /readyz   | 200 while it trains; 503 before its state is loaded, and once it was asked to stop |

A rank whose threads all hang answers nothing, which a liveness probe takes for unhealthy.
"""

import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import TCPServer
from threading import Thread
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from distap.errors import DistapError, logger
from distap.processes.watchdog import Watchdog


@dataclass
class Endpoint:
    """HTTP endpoint of one rank. The trainer sets its attributes as they become known."""

    rank: int = 0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    watchdog: Watchdog | None = None
    not_ready: Callable[[], str | None] = lambda: "starting"  # why it does not train now

    @contextmanager
    def served(self, port: int | None, address: str) -> Iterator["Endpoint"]:
        """Serve http://address:port from a thread while entered; without a port, do nothing."""
        if port is None:
            yield self
            return
        kind = _IPv6Server if ":" in address else _Server
        try:
            listening = make_server(address, port, self.answer, kind, RequestHandler)
        except OSError as error:
            problem = f"cannot listen on {address}:{port}: {error.strerror or error}"
            raise DistapError(f"metrics.port: {problem}; choose another, or null for none") from error
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

    def answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer an HTTP request as a WSGI application."""
        path = request.get("PATH_INFO", "/")
        if path == "/metrics":
            return cast(Iterable[bytes], make_wsgi_app(self.registry)(request, start))
        if path == "/healthz":
            fault = self.watchdog and self.watchdog.verdict
            status, content = self._said("leaving after a fault" if fault else None, "healthy")
            content |= {"fault": fault} if fault else {}
        elif path == "/readyz":
            status, content = self._said(self.not_ready(), "training")
        else:
            status, content = HTTPStatus.NOT_FOUND, {"error": "unknown path; expected /metrics, /healthz or /readyz"}
        start(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps({"rank": self.rank, **content}).encode() + b"\n"]

    def _said(self, problem: str | None, otherwise: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """Answer with the rank's activity, such as `describe of step 12`, and its seconds."""
        content: dict[str, Any] = {"status": problem or otherwise}
        if self.watchdog is not None:
            activity, seconds = self.watchdog.activity
            content |= {"activity": activity, "seconds": round(seconds, 1)}
        return HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK, content


class _Server(ThreadingWSGIServer):
    """prometheus_client's server with one thread per connection, so that a slow client delays no probe."""

    request_queue_size = 128  # with the usual 5, many connections at a time make a probe wait for seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s was broken off", client_address, exc_info=True)

    def server_bind(self) -> None:
        # The base class asks the name service for this host's name, and it may not answer.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class RequestHandler(WSGIRequestHandler):
    timeout = 10.0  # seconds in which a client has to send more of its request or take more of the answer

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because probes come every few seconds."""
