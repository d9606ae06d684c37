"""Middleware around every request: security headers, metrics, and no traceback to clients."""

import platform
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.process_collector import ProcessCollector
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import distap
from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.uploads import UPLOAD_PROBLEMS, RefusedError
from distap.errors import logger

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
CLIENT_GONE = 499  # as nginx counts them; nobody receives it
HEALTH_PATHS = ("/healthz", "/readyz")
HEADERS = {  # of every answer: what a browser may do with it
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src"
        " 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
SERVER_FAILED = RefusedError(
    500, "failed", "the server failed at this request, and has written why into its log"
)


class ServingMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "distap_search", "registry": self.registry}
        ProcessCollector(registry=self.registry)
        Info("build", "Versions", **common).info(
            {
                "version": distap.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
        )
        self.requests = Counter("requests", "Requests answered", ["route", "status"], **common)
        self.seconds = Histogram(
            "request_duration_seconds",
            "Seconds from a request's headers to the end of its answer",
            ["route"],
            buckets=BUCKETS,
            **common,
        )
        self.refused = Counter(
            "uploads_refused", "Uploads that were not searched for", ["reason"], **common
        )
        self.in_flight = Gauge("requests_in_flight", "Requests under way", **common)
        self.images = Gauge("index_images", "Images in the index", **common)
        self.generation = Gauge("index_generation", "Generation of the index", **common)
        # Series that exist from the start can be alerted on before their first event.
        for problem in UPLOAD_PROBLEMS:
            self.refused.labels(problem)


class Guard:
    """ASGI middleware around an application, whose requests the metrics count.

    Starlette's TrustedHost refuses any name but the server's own, which a page could make point
    here to read the gallery through a visitor's browser. Probes, and the address that a connection
    was made to, which Prometheus asks for, need no name. A page of another site may send an upload,
    but its browser lets it read no answer.
    """

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, settings: ServeSettings) -> None:
        self._app = app
        self._metrics = metrics
        hosts = ["localhost", "127.0.0.1", "[::1]", socket.gethostname(), settings.host_in_url]
        hosts += settings.allowed_host or ()
        self._trusting = TrustedHostMiddleware(app, hosts, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                await self._chosen(scope)(scope, receive, guarded)
            except ClientDisconnect:
                status = status or CLIENT_GONE
            except Exception:
                logger.exception("%s %s failed", scope["method"], _route(scope))
                if status:  # the answer has begun and cannot be replaced
                    raise
                await SERVER_FAILED.answer()(scope, receive, guarded)
            finally:
                route = _route(scope)
                self._metrics.requests.labels(route, str(status or CLIENT_GONE)).inc()
                self._metrics.seconds.labels(route).observe(time.monotonic() - started)

    def _chosen(self, scope: Scope) -> ASGIApp:
        """Return the application that answers a request, chosen by the header Host."""
        try:
            host = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname
        except ValueError:
            return self._trusting
        has_address = host == (scope.get("server") or ("",))[0]
        return self._app if scope["path"] in HEALTH_PATHS or has_address else self._trusting


def _route(scope: Scope) -> str:
    """Return the route as declared, so that clients cannot create metric series by inventing
    paths."""
    return str(getattr(scope.get("route"), "path", "other"))
