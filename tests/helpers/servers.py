"""Real servers for tests: a web server on a thread, with faults on demand, and two that speak S3
and Google's API.
"""

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from distap.storage.files import Storage

# of Google's API
MEDIA = "/download/storage/v1/b/bucket/o/"
METADATA = "/storage/v1/b/bucket/o/"


class WebServer(ThreadingHTTPServer):
    """Serves a folder as nginx does, apart from the faults that are asked for; and as S3 and Google
    do, to read.
    """

    daemon_threads = True
    handler: type["Handler"]
    request_queue_size = 128  # of connections that are made at once

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(self.handler, directory=str(folder)))
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []  # path and range of each
        # Of the next requests for bytes, one each: a status, "cut", "short", "flip", "stall",
        # "endless", "chunked" (endless without a length), "packed" (a gzip bomb), "elsewhere" (a
        # Content-Range that was not asked for), "late" (answered once another request is a
        # "release"), or the URL that it redirects to.
        self.faults: list[str] = []
        self.ranges = True
        self.released = threading.Event()
        self._lock = threading.Lock()

    def base(self, scheme: str) -> str:
        """URL of the folder."""
        return self.url if scheme == "http" else f"{scheme}://bucket"

    def options(self, scheme: str) -> dict[str, dict[str, object]]:
        """What fsspec's configuration needs to reach it."""
        settings = {"http": {}, "s3": {"anon": True}, "gs": {"token": "anon"}}[scheme]
        return {} if scheme == "http" else {scheme: {"endpoint_url": self.url, **settings}}

    def storage(self, scheme: str) -> Storage:
        """The folder by a scheme, as fsspec is configured from here on."""
        fsspec.config.conf |= self.options(scheme)
        return Storage(self.base(scheme))

    def asked(self) -> int:
        """How often bytes were asked for."""
        return sum("bytes=" in request for request in self.requests)

    def next_fault(self, request: str) -> str:
        with self._lock:
            self.requests.append(request)
            return self.faults.pop(0) if self.faults and "bytes=" in request else ""

    def handle_error(self, request, client_address) -> None:
        """Say nothing of clients that went away."""


class Handler(SimpleHTTPRequestHandler):
    server: WebServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        fault = self.server.next_fault(f"{self.path} {wanted}")
        if fault.isdigit():
            self.send_error(int(fault))
            return
        if fault == "stall":
            self.server.released.wait()
            return
        if fault == "late":
            self.server.released.wait()
        if fault == "release":
            self.server.released.set()
        if "://" in fault:
            self.send_response(302)
            # `URI` is what servers sent once, and clients still follow
            header, _, place = fault.rpartition(" ")
            self.send_header(header or "Location", place + self.path)
            self.end_headers()
            return
        if fault in ("endless", "chunked", "packed"):
            self._send_without_end(fault)
            return
        is_metadata = self.path.startswith(METADATA)
        path = self._file()
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        if is_metadata:
            data = json.dumps({"name": path.name, "size": str(len(data)), "etag": "1"}).encode()
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if bounds and self.server.ranges:
            first = int(bounds[1])
            last = min(int(bounds[2]), len(data) - 1)
            if first >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            begin = first + 1 if fault == "elsewhere" else first
            self.send_header("Content-Range", f"bytes {begin}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(200)
        if fault == "short":
            data = data[: len(data) // 2]
        if fault == "flip":
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        if fault == "cut":
            self.close_connection = True

    def _send_without_end(self, fault: str) -> None:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(200)) + packer.flush()
        headers = {
            "endless": ("Content-Length", str(10**12)),
            "chunked": ("Transfer-Encoding", "chunked"),
            "packed": ("Content-Encoding", "gzip"),
        }
        self.protocol_version = "HTTP/1.1"
        self.send_response(206)
        self.send_header(*headers[fault])
        self.end_headers()
        piece = {
            "endless": bytes(2**16),
            "chunked": b"10000\r\n" + bytes(2**16) + b"\r\n",
            "packed": bomb,
        }[fault]
        with suppress(OSError):  # the client has enough
            while True:
                self.wfile.write(piece)

    def do_HEAD(self) -> None:
        self._file()
        super().do_HEAD()

    def _file(self) -> Path:
        for prefix in (MEDIA, METADATA, "/bucket/"):
            if self.path.startswith(prefix):
                self.path = f"/{self.path.removeprefix(prefix)}"
        return Path(self.translate_path(self.path))

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal free."""


WebServer.handler = Handler


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nothing listens on.

    Below those that Linux gives to connections, one of which might take them before they are
    listened on.
    """
    beginning = 20_000 + os.getpid() % 1000 * 10  # tests run side by side
    for port in range(beginning, 32_000, count):
        with ExitStack() as stack, suppress(OSError):
            for index in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", index))
            return port
    raise AssertionError("no ports are free")


@contextmanager
def web_server(folder: Path, kind: type[WebServer] = WebServer) -> Iterator[Any]:
    with kind(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


# moto's server in a process that ends with the one that started it, as its pipe closes. A server
# on a thread would be in the middle of something, such as holding a lock, in each fork of a test.
S3_PROCESS = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@cache
def _s3_process() -> str:
    """Start the S3 server of all tests of this process; return its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", S3_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    return f"http://{host}:{port}"


@contextmanager
def s3_server(url: str = "") -> Iterator[None]:
    """A server that speaks S3, with a bucket called `shards`; the environment says how to reach
    it.

    `url` is that of a server of the test's own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", url or _s3_process())
        # The server keeps buckets from test to test.
        s3_files().makedirs("shards", exist_ok=True)
        yield


@contextmanager
def s3_server_here() -> Iterator[None]:
    """As `s3_server`, on a thread of this process, in which moto's `get_backend` finds its
    objects."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with s3_server(f"http://{host}:{port}"):
            yield
    finally:
        server.stop()


@contextmanager
def gcs_server() -> Iterator[None]:
    """A server that speaks Google's API, with a bucket called `shards`; fsspec's options say how to
    reach it.
    """
    from gcp_storage_emulator.server import create_server

    port = free_ports(1)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="shards")
    server.start()
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "test"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "gs", options)
            yield
    finally:
        server.stop()


def s3_files():
    """An S3 file system to arrange a test with."""
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
