"""A store on this machine: files over HTTP, each answer after a delay, all at a limited bandwidth.

    python -m benchmarks.store_server FOLDER --delay-ms 80 --bytes-per-second 1e8 --fail 0.05

It prints its port, and answers GET and HEAD with ranges, as web servers do, and as S3 does for
unsigned or signed requests: /BUCKET/KEY is the file KEY in the folder BUCKET. /__counters answers
with what was asked of it so far, as JSON, at once.
"""

import asyncio
import json
import math
import mmap
import os
import random
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import unquote, urlsplit

import typer

ROOT = Path(__file__).parents[1]
COUNTERS = "/__counters"
PIECE = 2**17  # bytes that a connection sends before others have their turn
# Seconds of the link that may be made up for: sleeping is no finer than a millisecond.
CREDIT_SECONDS = 0.01
LARGEST_HEAD = 2**16  # bytes of a request
REASONS = {
    200: "OK",
    206: "Partial Content",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
    503: "Slow Down",
}


class Link:
    """The bandwidth that all connections share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = 0.0

    async def carry(self, count: int) -> None:
        """Wait until the link has carried so many more bytes."""
        now = time.monotonic()
        started = max(self._free_at, now - CREDIT_SECONDS)
        self._free_at = started + count * self._seconds_per_byte
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class Request(NamedTuple):
    """What a client asks for."""

    method: str
    path: str
    wanted: str  # its header Range; "" for a whole file
    closes: bool  # whether it closes the connection after the answer


class Answer(NamedTuple):
    """Status, further headers and body of an answer; HEAD leaves the body out."""

    status: int
    headers: dict[str, str]
    body: memoryview


NOTHING = memoryview(b"")


class StoreServer:
    """Serves the files of a folder from memory."""

    def __init__(
        self, folder: Path, delay_seconds: float, bytes_per_second: float, fail: float
    ) -> None:
        self.folder = folder.resolve()
        self.delay_seconds = delay_seconds
        self.link = Link(bytes_per_second)
        self.fail = fail
        self.counters = Counter[str](requests=0, bytes=0, failures=0, connections=0)
        self._drawing = random.Random(0)  # which requests fail

    async def serve(self, listener: socket.socket) -> None:
        """Answer every connection until this process ends."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        tasks = set[asyncio.Task[None]]()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.counters["connections"] += 1
            task = loop.create_task(self._serve(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(ConnectionError, ValueError):
            waiting = b""
            while True:
                while b"\r\n\r\n" not in waiting:
                    data = await loop.sock_recv(connection, PIECE)
                    waiting += data
                    if not data or len(waiting) > LARGEST_HEAD:
                        return
                head, _, waiting = waiting.partition(b"\r\n\r\n")
                request = _parsed(head.decode("latin-1"))
                if request.path == COUNTERS:
                    body = memoryview(json.dumps(self.counters).encode())
                    await loop.sock_sendall(connection, _head(Answer(200, {}, body)) + body)
                else:
                    await self._answer(connection, request)
                if request.closes:
                    return

    async def _answer(self, connection: socket.socket, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self.counters["requests"] += 1
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self._drawing.random() < self.fail:
            self.counters["failures"] += 1
            answer = Answer(503, {}, NOTHING)
        else:
            answer = self._answer_to(request)
        waiting = _head(answer)
        body = answer.body if request.method == "GET" else NOTHING
        for start in range(0, len(body), PIECE):
            piece = body[start : start + PIECE]
            await self.link.carry(len(piece))
            await loop.sock_sendall(connection, waiting + piece if waiting else piece)
            self.counters["bytes"] += len(piece)
            waiting = b""
        await loop.sock_sendall(connection, waiting)

    def _answer_to(self, request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return Answer(405, {"Allow": "GET, HEAD"}, NOTHING)
        path = (self.folder / unquote(request.path).lstrip("/")).resolve()
        if not (path.is_relative_to(self.folder) and path.is_file()):
            return Answer(404, {}, NOTHING)
        facts = path.stat()
        data = _mapped(path, facts.st_mtime_ns, facts.st_size)
        headers = {
            "Accept-Ranges": "bytes",
            "ETag": f'"{facts.st_mtime_ns:x}-{facts.st_size:x}"',
            "Last-Modified": time.strftime(
                "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(facts.st_mtime)
            ),
        }
        if not request.wanted:
            return Answer(200, headers, data)
        start, stop = _bounds(request.wanted, len(data))
        if start >= stop:
            return Answer(416, {"Content-Range": f"bytes */{len(data)}"}, NOTHING)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return Answer(206, headers, data[start:stop])


def _parsed(head: str) -> Request:
    """Parse the head of a request, or raise a ValueError."""
    line, *lines = head.split("\r\n")
    method, target, version = line.split(" ")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (header.partition(":") for header in lines)
    }
    closes = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
    return Request(method, urlsplit(target).path, headers.get("range", ""), closes)


def _head(answer: Answer) -> bytes:
    headers = {"Content-Length": str(len(answer.body)), **answer.headers}
    lines = [f"HTTP/1.1 {answer.status} {REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _bounds(wanted: str, length: int) -> tuple[int, int]:
    """Return start and stop of `bytes=2-5`, `bytes=2-` or `bytes=-5`; 0, 0 of another range."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if match is None or match[0] == "bytes=-":
        return 0, 0
    if not match[1]:
        return max(0, length - int(match[2])), length
    last = int(match[2]) if match[2] else length - 1
    return int(match[1]), min(last + 1, length)


@cache
def _mapped(path: Path, changed: int, size: int) -> memoryview:
    """Return the bytes of a file of this size, which changed last at this time."""
    with path.open("rb") as file:
        if not size:  # nothing cannot be mapped
            return NOTHING
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))


class RunningStore(NamedTuple):
    """A store server in another process."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counters(self) -> Counter[str]:
        """Return how many requests, bytes of bodies, failures and connections it has counted."""
        with urllib.request.urlopen(self.url + COUNTERS) as answer:
            return Counter(json.load(answer))


@contextmanager
def running_store(
    folder: Path, delay_ms: float = 0, bytes_per_second: float = math.inf, fail: float = 0
) -> Iterator[RunningStore]:
    """Serve a folder from a new process, which ends with this context, or with this process."""
    command = [sys.executable, "-m", "benchmarks.store_server", str(folder.absolute())]
    command += ["--delay-ms", str(delay_ms), "--fail", str(fail)]
    command += ["--bytes-per-second", str(bytes_per_second)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield RunningStore(int(process.stdout.readline()))
        finally:
            process.kill()


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the files.", exists=True)],
    delay_ms: Annotated[
        float, typer.Option(help="Milliseconds before each answer begins.", min=0)
    ] = 0.0,
    bytes_per_second: Annotated[
        float, typer.Option(help="Bandwidth that all connections share.", min=1)
    ] = math.inf,
    fail: Annotated[
        float, typer.Option(help="Share of the requests that are answered by 503.", min=0, max=1)
    ] = 0.0,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0)] = 0,
) -> None:
    """Serve a folder as a slow store does, until Ctrl-C.

    If standard input is a pipe, the server ends with the process at its other end.
    """
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_input, daemon=True).start()
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        server = StoreServer(folder, delay_ms / 1000, bytes_per_second, fail)
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(listener))


def _end_with_input() -> None:
    while os.read(0, PIECE):
        pass
    os._exit(0)


if __name__ == "__main__":
    typer.run(main)
