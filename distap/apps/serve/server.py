"""Run a server: it listens while the index is being loaded, and stops without losing a request."""

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import FrameType

from distap.apps.search import open_searcher, open_thumbnails
from distap.apps.serve.settings import ServeSettings, url_of
from distap.errors import FINISHED, DistapError
from distap.telemetry.terminal import console, set_up_logging
from distap.world import lone_world

try:
    import python_multipart  # noqa: F401 - FastAPI needs it for forms, and would only notice at the first one
    import uvicorn

    from distap.apps.serve.app import build_app
    from distap.apps.serve.connections import ACCEPTED_AT_ONCE, Connection, Connections
    from distap.apps.serve.decoders import prepare_decoders
    from distap.apps.serve.service import Service
except ImportError as error:
    raise DistapError(f"serving needs {error.name}: pip install 'distap[serve]'") from error

BACKLOG = 2048
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
        host, port = listener.getsockname()[:2]
        console.print(f"serving on {url_of(host, port)}", markup=False)
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
        raise settings.cannot_listen(error) from error
    # Connections inherit this. asyncio sets it only on sockets of its own; without it answers wait for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, which also calls `load` in a thread while it listens, and drains before it closes."""

    def __init__(self, service: Service, load: Callable[[], None]) -> None:
        settings, connections = service.settings, Connections(service.settings.uploads)
        super().__init__(
            uvicorn.Config(
                build_app(service),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=partial(Connection, connections),  # type: ignore[arg-type]
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=int(2 * settings.timeout_seconds) + 1,
            )
        )
        self.loading: Future[None] = Future()
        self._service, self._load, self._connections = service, load, connections
        self._asked = 0.0  # to stop, by time.monotonic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)  # uvicorn has lowered it to what asyncio accepts at once
        self.loading = ThreadPoolExecutor(1, "loading").submit(self._load)
        self.loading.add_done_callback(self._end_if_failed)

    async def on_tick(self, counter: int) -> bool:
        """Tell whether to close; uvicorn asks ten times a second."""
        drained = time.monotonic() - self._asked >= self._service.settings.drain_seconds
        self.should_exit |= self._service.draining and drained
        self._connections.close_idle()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.hurry()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal; close at the second."""
        self.should_exit |= self._service.draining
        self._service.draining, self._asked = True, self._asked or time.monotonic()

    def _end_if_failed(self, loading: Future[None]) -> None:
        self.should_exit |= loading.exception() is not None
