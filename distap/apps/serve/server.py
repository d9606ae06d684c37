"""Run a server: it loads the index, listens, and stops without losing a request."""

import logging
import signal
import socket
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any, cast

from distap.apps.search import open_searcher, open_thumbnails
from distap.apps.serve.limits import ServeSettings
from distap.errors import DistapError, logger
from distap.retrieval.generations import current_generation
from distap.retrieval.stored_index import read_index
from distap.telemetry.terminal import console, set_up_logging
from distap.world import World, device_of

SECONDS_BETWEEN_LOOKS = 1.0  # between looks at the name of the current generation

try:
    import python_multipart  # noqa: F401 - FastAPI needs it for forms, and would only notice at the first one
    import uvicorn

    from distap.apps.serve.app import Service, build_app
    from distap.apps.serve.connections import (
        ACCEPTED_AT_ONCE,
        BACKLOG,
        Connection,
        Connections,
        connections_within_files,
    )
except ImportError as error:
    raise DistapError(
        "package.missing", f"serving needs {error.name}: pip install 'distap[serve]'"
    ) from error


def serve(
    settings: ServeSettings,
    index: Path,
    checkpoint: Path | str,
    whitening: Path | None,
    images: str | None,
    best: bool,
    trust: bool = False,
) -> None:
    """Answer requests until SIGTERM or SIGINT.

    `open_searcher` and `open_thumbnails` explain the arguments.
    """
    world = World(device=device_of(0))
    with listening(
        settings
    ) as listener:  # first, since loading takes long and the port may be taken
        set_up_logging(world.rank)
        # The metrics count a client's mistakes; a line for each would let anyone fill the log.
        for name in ("python_multipart", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.ERROR)
        connections = Connections(connections_within_files(settings), settings.timeout_seconds)
        searcher = open_searcher(index, checkpoint, whitening, world=world, best=best, trust=trust)
        service = Service(settings, searcher, open_thumbnails(searcher.index, images))
        ending = Event()
        Thread(target=_follow, args=(index, service, images, ending), daemon=True).start()
        url = f"http://{settings.host_in_url}:{listener.getsockname()[1]}"
        images_served = f"{len(searcher.index):,} images of {searcher.index.data}"
        console.print(f"serving {images_served} on {url}", markup=False)
        try:
            server = server_of(service, connections)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
                signal.signal(signal.SIGHUP, server.handle_exit)
            server.run([listener])
        finally:
            ending.set()
            service.close()


def _follow(folder: Path, service: Service, images: str | None, ending: Event) -> None:
    """Serve each new generation of the index, beside which the one before ends its requests."""
    unusable = ""
    logged = ""
    while not ending.wait(SECONDS_BETWEEN_LOOKS):
        name = unusable
        try:
            name = current_generation(folder).name
            if name in (unusable, service.served.searcher.index.generation):
                continue
            # Both generations are open from here to the end of the last request of the old one. Its
            # rows are mapped, so this takes no second memory for descriptors.
            # `current` is read again there, and may name a still newer one, which is as good.
            index = read_index(folder)
            describer = service.served.searcher.describer
            if describer is not None and describer.described_by not in index.makers:
                raise DistapError(
                    "descriptors.other_network",
                    f"{folder}: generation {name} was described by another network or in another"
                    " way: start a server with its --checkpoint",
                )
            service.swap(index, open_thumbnails(index, images))
            console.print(f"serving generation {name}: {len(index):,} images", markup=False)
        except Exception as error:
            # It may be damaged, so do not read it again and again. The next one is looked at.
            unusable = name
            # A folder that is gone has no name to remember, and would fill the log every second.
            if str(error) != logged:
                logger.warning("the old generation is served on: %s", error)
            logged = str(error)


def listening(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the host and port of the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=BACKLOG
        )
    except OSError as error:
        raise DistapError(
            "serve.cannot_listen",
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose"
            " another --host or --port",
        ) from error
    # Connections inherit this, without which answers wait for 40 ms. asyncio sets it on its own
    # sockets only.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def server_of(service: Service, connections: Connections) -> uvicorn.Server:
    """Return a server whose connections wait for their clients within limits."""
    return _Server(
        uvicorn.Config(
            build_app(service),
            # uvicorn calls this with the arguments of its own class.
            http=cast(Any, partial(Connection, connections)),
            backlog=ACCEPTED_AT_ONCE,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            # A request may take this long to arrive, and as long again to be searched for.
            timeout_graceful_shutdown=int(2 * service.settings.timeout_seconds) + 1,
        )
    )


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a backlog of BACKLOG connections.

        asyncio takes the backlog of uvicorn's settings also for the number of connections that it
        accepts at once, which must be smaller.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish the requests under way.

        uvicorn's own handler would then end the process by the signal.
        """
        self.should_exit = True
