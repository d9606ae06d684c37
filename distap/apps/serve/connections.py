"""Bound the connections of a server: their number, and how long one may send no header or read no answer."""

import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED_AT_ONCE = 64
MOST = 4096
RESERVED = 300  # open files beside connections and uploads: shards (128), libraries, decoders, accepted at once
HEADER_SECONDS = 10.0  # from a connection's begin, or its last answer, to the end of the next request's header
UNREAD_SECONDS = 20.0  # in which a client reads nothing of an answer that is longer than the sockets' buffers
logger = logging.getLogger("distap")


class Connections:
    """The connections that wait for a request or its header; above `most` in all, those that wait longest are closed.

    `uploads` is the most uploads at a time, each of which may take a file.
    """

    def __init__(self, uploads: int) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if files < 0 else max(min(MOST, files - RESERVED - uploads), ACCEPTED_AT_ONCE)
        self._waiting: dict[Connection, float] = {}  # since when, the longest first
        self._unread: dict[Connection, float] = {}  # since when their client has read nothing
        self._told = False

    def wait(self, connection: "Connection") -> None:
        """Note that a connection waits from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = time.monotonic()

    def bound(self, total: int) -> None:
        """Close a connection if there are too many; the last one waits."""
        if total > self._most:
            next(iter(self._waiting)).drop()
            if not self._told:
                logger.warning("more than %d connections: those that wait longest are closed", self._most)
            self._told = True

    def leave_unread(self, connection: "Connection") -> None:
        """Note that a client has stopped reading an answer."""
        self._unread[connection] = time.monotonic()

    def read(self, connection: "Connection") -> None:
        """Note that a client reads again."""
        self._unread.pop(connection, None)

    def forget(self, connection: "Connection") -> None:
        self._waiting.pop(connection, None)

    def close_idle(self) -> None:
        """Close those that have sent or read nothing for too long."""
        now = time.monotonic()
        for connections, limit in ((self._waiting, HEADER_SECONDS), (self._unread, UNREAD_SECONDS)):
            for connection in [one for one, since in connections.items() if now - since > limit]:
                connection.drop()


class Connection(H11Protocol):
    """uvicorn's, which knows no time limits of a header and of an answer."""

    def __init__(self, all_of_them: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all = all_of_them

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._all.wait(self)
        self._all.bound(len(self.connections))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._all.forget(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request had arrived already
            self._all.wait(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._all.leave_unread(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all.read(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def drop(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._all.forget(self)
        self._all.read(self)
