"""Run a server: it listens while the index is being loaded, and stops without losing a request."""

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any

from distap.apps.search import open_searcher, open_thumbnails
from distap.apps.serve.limits import ServeSettings
from distap.errors import FINISHED, DistapError
from distap.telemetry.terminal import console, set_up_logging
from distap.world import lone_world

try:
    import python_multipart  # noqa: F401 - FastAPI needs it for forms, and would only notice at the first one
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from distap.apps.serve.app import build_app
    from distap.apps.serve.decoders import prepare_decoders
    from distap.apps.serve.service import Service
except ImportError as error:
    raise DistapError(f"serving needs {error.name}: pip install 'distap[serve]'") from error

BACKLOG = 2048
SILENT_SECONDS = 10.0  # in which a client has to send a request's whole header, or to read more of an answer
LOADING_SECONDS = 5.0  # that loading may go on when the server is asked to stop before it is ready
logger = logging.getLogger("distap")


def serve(
    settings: ServeSettings,
    index: Path,
    checkpoint: Path | str,
    whitening: Path | None,
    images: str | None,
    best: bool,
) -> None:
    """Answer requests until SIGTERM or SIGINT; `open_searcher` and `open_thumbnails` explain the arguments."""
    world = lone_world()
    with listening(settings) as listener:
        set_up_logging(world.rank)
        # A client's mistakes are counted in the metrics; a line for each would let anyone fill the log.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        service = Service(settings)

        def load() -> None:
            prepare_decoders()
            searcher = open_searcher(
                index, checkpoint, whitening, world=world, best=best, max_pixels=settings.pixels_of
            )
            service.load(searcher, open_thumbnails(searcher.index, images, searcher.remote))
            logger.info("ready: %s images of %s", f"{len(searcher.index):,}", searcher.index.data)

        server = _Server(service, load)
        console.print(f"serving on http://{settings.host_in_url}:{listener.getsockname()[1]}", markup=False)
        try:
            server.run([listener])
            if wait([server.loading], LOADING_SECONDS).not_done:
                # Python would crash at its end while a thread is inside a library, and there is nothing to save.
                os._exit(FINISHED)
        finally:
            service.close()
        server.loading.result()


def listening(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the host and port of the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        problem = f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
        raise DistapError(f"{problem}; choose another --host or --port") from error
    # Connections inherit this. asyncio sets it only on sockets of its own; without it answers wait for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Connection(H11Protocol):
    """uvicorn's connection with a time-out, since uvicorn itself keeps an idle client's open file for ever.

    uvicorn's own time limit begins with an answer and ends with the first byte of the next request; its limit of
    connections would answer probes with 503 as well.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silence = self.loop.call_later(SILENT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_owed():  # parts of a header do not count
            self._silence.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._silence.cancel()

    def _is_owed(self) -> bool:
        """Tell whether the client has to read an answer or to send a request."""
        return self.flow.write_paused or self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        self._silence.cancel()
        if self._is_owed():
            self._silence = self.loop.call_later(SILENT_SECONDS, self.transport.abort)


class _Server(uvicorn.Server):
    """uvicorn's server, which also calls `load` in a thread while it listens, and drains before it closes."""

    def __init__(self, service: Service, load: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(service),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=_Connection,
                timeout_graceful_shutdown=int(2 * service.settings.timeout_seconds) + 1,
            )
        )
        self.loading: Future[None] = Future()
        self._service, self._load = service, load
        self._asked = 0.0  # to stop, by time.monotonic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loading = ThreadPoolExecutor(1, "loading").submit(self._load)
        self.loading.add_done_callback(self._end_if_failed)

    async def on_tick(self, counter: int) -> bool:
        """Tell whether to close; uvicorn calls this ten times per second."""
        drained = time.monotonic() - self._asked >= self._service.settings.drain_seconds
        self.should_exit |= self._service.draining and drained
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal; close at the second."""
        self.should_exit |= self._service.draining
        self._service.draining, self._asked = True, self._asked or time.monotonic()

    def _end_if_failed(self, loading: Future[None]) -> None:
        self.should_exit |= loading.exception() is not None
