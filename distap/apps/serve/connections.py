"""Bound the connections of a server: their number, and the time for which one waits for its client.

uvicorn itself closes only connections that are silent after an answer, and hypercorn does no more.
granian has a deadline for headers, but none for bodies and answers.
"""

import asyncio
import resource
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from distap.apps.serve.limits import ServeSettings, seconds_to_arrive
from distap.errors import DistapError

BACKLOG = 128  # connections that the system accepts before the server does
ACCEPTED_AT_ONCE = 16  # of them by the server
MAX_CONNECTIONS = 1000
OTHER_FILES = 100  # of the index, shards, decoders and libraries
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: wait for 0 s


@dataclass(eq=False)
class Connections:
    """The connections of a server, and the seconds for which it waits for a client.

    Above `limit`, the connection that has waited longest for its client is closed, so that
    newcomers such as probes get answers, however many connections a stranger holds. Connections
    whose bodies arrive come last.
    """

    limit: int
    body_seconds: float  # from the end of a header to the end of the body
    answer_seconds: float = 5.0  # after these, in which a body that is too slow is answered
    # From the start of a connection, or its last answer, to the end of the next header.
    header_seconds: float = 10.0
    # For reading some of an answer that does not fit into the system's buffers.
    unread_seconds: float = 10.0
    waiting: dict["Connection", None] = field(default_factory=dict)  # the longest first

    def make_room(self) -> None:
        idle = (connection for connection in self.waiting if connection.awaited != "body")
        next(idle, next(iter(self.waiting))).drop()


class Connection(H11Protocol):
    """A connection of uvicorn that is closed if the server waits for its client for too long.

    The client has to send a header, to send the rest of a body, or to read its answers. The time in
    which the server works at an answer does not count.
    """

    def __init__(self, all_connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all = all_connections
        # What the client has to do; None if it is the server's turn.
        self.awaited: str | None = None
        self._since = 0.0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update()
        if len(self.connections) > self._all.limit:
            self._all.make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()
        self._received += len(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is no HTTP, unless an answer to it has begun.

        uvicorn would log two answers as a failure.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.drop()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application's answer goes nowhere
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def drop(self) -> None:
        """Close the connection at once, and drop the bytes that its client has not read."""
        self._stop_waiting()
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, RESET
        )
        self.transport.abort()

    def _update(self) -> None:
        """Start or end the client's time when the turn changes."""
        awaited = self._what_is_awaited()
        if awaited == self.awaited or self not in self.connections:  # the latter: it is closed
            return
        self._stop_waiting()
        if awaited is not None:
            self.awaited = awaited
            self._since = self.loop.time()
            self._received = 0
            self._all.waiting[self] = None
            self._close_if_late()

    def _what_is_awaited(self) -> str | None:
        if self.flow.write_paused:
            return "reading"
        if not self.cycle:  # None before the first request
            return "header"
        if self.cycle.more_body:
            return "body"
        return "header" if self.cycle.response_complete else None

    def _close_if_late(self) -> None:
        if self.awaited == "header":
            seconds = self._all.header_seconds
        elif self.awaited == "reading":
            seconds = self._all.unread_seconds
        else:  # the more of it is here, the longer
            seconds = (
                seconds_to_arrive(self._received, self._all.body_seconds) + self._all.answer_seconds
            )
        deadline = self._since + seconds
        if self.loop.time() < deadline:
            self._timer = self.loop.call_at(deadline, self._close_if_late)
        else:
            self.drop()

    def _stop_waiting(self) -> None:
        self.awaited = None
        self._all.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connections_within_files(settings: ServeSettings) -> int:
    """Return the number of connections for which the process may open files.

    Raise the soft limit of open files for them.

    Raises:
        DistapError: the hard limit leaves no files for connections.
    """
    uploads = settings.threads + settings.queue
    accepted = 3 * ACCEPTED_AT_ONCE  # asyncio reports a connection two rounds after it accepted it
    other_files = uploads + accepted + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CONNECTIONS + other_files
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if files <= other_files:
        raise DistapError(
            "serve.too_few_files",
            f"the limit of {hard:,} open files leaves none for connections: raise it above"
            f" {other_files:,} (`ulimit -n`), or lower --queue",
        )
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files - other_files
