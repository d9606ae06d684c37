"""Clients over real sockets that let a server wait, each of a kind that would hold a connection for
ever.
"""

import logging
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from galleries import upload
from serving import BOUNDARY, body

from distap.apps.search import open_thumbnails
from distap.apps.serve.app import Service
from distap.apps.serve.connections import Connections
from distap.apps.serve.limits import ServeSettings, seconds_to_arrive
from distap.apps.serve.server import listening, server_of

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST
UPLOAD = (
    b"POST /api/search HTTP/1.1\r\n"
    + HOST
    + f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n".encode()
)
LENGTH = b"Content-Length: 100000\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
# What a client sends first, and then again and again.
SLOW = {
    "nothing": (b"", b""),
    "a header line by line": (HEALTH, b"X: y\r\n"),
    "a header byte by byte": (b"G", b"E"),
    "half a header": (HEALTH, b""),
    "a second header": (HEALTH + b"\r\nGET", b" "),
    "an upload": (UPLOAD + LENGTH, b"x"),
    "half an upload": (UPLOAD + LENGTH, b""),
    "chunks of an upload": (UPLOAD + CHUNKED, b"1\r\n-\r\n"),
    "a body of a route without": (HEALTH + LENGTH, b"x"),
    "a body of no route": (b"POST /nothing HTTP/1.1\r\n" + HOST + LENGTH, b"x"),
    "a body of a search by key": (b"GET /api/search?key=none HTTP/1.1\r\n" + HOST + LENGTH, b"x"),
    "chunks without end": (HEALTH + CHUNKED, b"400\r\n" + bytes(1024) + b"\r\n"),
    "trailers without end": (HEALTH + CHUNKED + b"0\r\n", b"X: y\r\n"),
    "an upload announced": (UPLOAD + b"Expect: 100-continue\r\n" + LENGTH, b""),
}


@contextmanager
def serving_here(searcher, most: int, seconds: float) -> Iterator[int]:
    """Port of a server in this process."""
    settings = ServeSettings(port=0, threads=1, timeout_seconds=seconds)
    service = Service(settings, searcher, open_thumbnails(searcher.index))
    connections = Connections(
        most,
        body_seconds=seconds,
        answer_seconds=seconds,
        header_seconds=seconds,
        unread_seconds=seconds,
    )
    server = server_of(service, connections)
    listener = listening(settings)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@pytest.fixture(scope="module")
def impatient(searcher):
    with serving_here(searcher, most=100, seconds=0.3) as port:
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def received_until_closed(client: socket.socket, again: bytes) -> bytes:
    """Send `again` whenever there is nothing to read."""
    received = b""
    try:
        while True:
            if select.select([client], [], [], 0.01)[0]:
                data = client.recv(65536)
                if not data:
                    return received
                received += data
            else:
                client.sendall(again)
    except ConnectionError:
        return received


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SLOW)
def test_a_client_that_lets_the_server_wait_is_cut_off(impatient, name):
    first, again = SLOW[name]
    with connected(impatient) as client:
        client.sendall(first)
        received_until_closed(client, again)


@pytest.mark.timeout(60)
def test_a_slow_upload_is_answered_before_it_is_cut_off(impatient):
    with connected(impatient) as client:
        client.sendall(UPLOAD + LENGTH + body(b"")[:-40])
        assert received_until_closed(client, b"x").startswith(b"HTTP/1.1 408")


@pytest.mark.timeout(60)
def test_a_client_that_reads_none_of_its_answers_is_cut_off(impatient):
    asked = (b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n") * 100
    with connected(impatient) as client:
        client.setblocking(False)
        with pytest.raises(ConnectionError):
            while True:
                try:
                    client.send(asked)
                except BlockingIOError:
                    select.select([], [client], [], 0.05)


def test_a_slow_search_is_no_reason_to_cut_its_client_off(searcher, monkeypatch):
    asked = threading.Event()
    go_on = threading.Event()
    kind = type(searcher.index)
    search = kind.search

    def waiting(*arguments, **options):
        asked.set()
        assert go_on.wait(60)
        return search(*arguments, **options)

    monkeypatch.setattr(kind, "search", waiting)
    key = next(iter(searcher.index.rows))
    with serving_here(searcher, most=2, seconds=20) as port:
        url = f"http://127.0.0.1:{port}"
        with ExitStack() as idle, connected(port) as client:
            target = httpx.URL(f"{url}/api/search", params={"key": key}).raw_path
            client.sendall(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
            assert asked.wait(60)
            for _ in range(10):
                idle.enter_context(connected(port))
                assert httpx.get(f"{url}/healthz").status_code == 200
            go_on.set()
            assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_bound_close_those_that_wait_longest(searcher):
    with serving_here(searcher, most=8, seconds=60) as port, ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(200)]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert all(received_until_closed(client, b"") == b"" for client in clients[:-8])
        clients[-1].sendall(HEALTH + b"\r\n")
        assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200")


def test_idle_connections_are_closed_before_one_whose_upload_arrives(searcher):
    image = body(upload(0))
    with (
        serving_here(searcher, most=4, seconds=60) as port,
        ExitStack() as idle,
        connected(port) as client,
    ):
        client.sendall(
            UPLOAD + f"Expect: 100-continue\r\nContent-Length: {len(image)}\r\n\r\n".encode()
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 100")
        client.sendall(image[:-10])
        for _ in range(50):
            idle.enter_context(connected(port))
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        client.sendall(image[-10:])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [b"garbage\r\n\r\n", HEALTH + CHUNKED + b"garbage\r\n", UPLOAD + CHUNKED + b"garbage\r\n"],
    ids=["a header", "a body", "an upload"],
)
def test_what_is_no_http_is_refused_without_a_traceback(impatient, caplog, sent):
    with connected(impatient) as client:
        client.sendall(sent)
        assert received_until_closed(client, b"").startswith(b"HTTP/1.1 400")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_body_that_turns_into_garbage_after_its_answer_leaves_no_traceback(impatient, caplog):
    with connected(impatient) as client:
        client.sendall(HEALTH + CHUNKED)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"garbage\r\n")
        received_until_closed(client, b"")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_more_of_a_body_is_here_the_longer_it_may_take():
    assert seconds_to_arrive(0, 30.0) < seconds_to_arrive(10_000, 30.0) < 30.0
    assert seconds_to_arrive(10_000_000, 30.0) == 30.0


def connections_for(files: int) -> subprocess.CompletedProcess[str]:
    """Ask for the connections of a process that may open so many files."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {files}))\nfrom"
        " distap.apps.serve.connections import connections_within_files\nfrom"
        " distap.apps.serve.limits import"
        " ServeSettings\nprint(connections_within_files(ServeSettings()),"
        " resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_there_are_fewer_connections_than_files_and_the_soft_limit_is_raised_for_them():
    connections, files = map(int, connections_for(1024).stdout.split())
    assert 700 < connections < 1024 - 200 and files == 1024
    assert connections_for(10_000).stdout.startswith("1000 ")


def test_a_limit_of_files_that_leaves_none_for_connections_is_refused():
    error = connections_for(200).stderr
    assert "DistapError" in error and "200 open files" in error and "ulimit -n" in error
