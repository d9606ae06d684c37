"""What every request passes: security headers, metrics, and no traceback to a client."""

import logging
import time

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distap.apps.serve.metrics import ServingMetrics
from distap.apps.serve.problems import RefusedError

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
CLIENT_GONE = 499  # as nginx counts them; nobody receives it
logger = logging.getLogger("distap")


class Guard:
    """Middleware around an application.

    Args:
        app: to guard.
        metrics: that count its requests.
    """

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, guarded)
            except ClientDisconnect:
                status = status or CLIENT_GONE
            except Exception:
                logger.exception("%s %s failed", scope["method"], _route(scope))
                if status:  # the answer has begun, and cannot be another one any more
                    raise
                await JSONResponse(FAILED.content, FAILED.status)(scope, receive, guarded)
            finally:
                self._metrics.answered(_route(scope), status or CLIENT_GONE, time.monotonic() - started)


FAILED = RefusedError(500, "failed", "the server failed at this request, and has written why into its log")


def _route(scope: Scope) -> str:
    """The path as it was declared: clients cannot make up new ones."""
    return str(getattr(scope.get("route"), "path", "other"))
