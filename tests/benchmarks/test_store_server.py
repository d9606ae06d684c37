"""The store of `benchmarks data --store`: what it answers, and what it counts."""

import http.client
import os
import subprocess
import sys

import pytest

from benchmarks.store_server import ROOT, running_store

DATA = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    (folder / "bucket").mkdir()
    (folder / "bucket/a key.bin").write_bytes(DATA)
    (folder / "bucket/empty").write_bytes(b"")
    (folder.parent / "secret").write_bytes(b"secret")
    with running_store(folder) as server:
        yield server


def asked(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=5-9", 5, 10),
        ("bytes=255990-", 255_990, 256_000),
        ("bytes=-7", 255_993, 256_000),
        ("bytes=255990-999999", 255_990, 256_000),
        ("bytes=0-199999", 0, 200_000),
    ],
)
def test_a_range_is_answered_by_its_bytes_and_their_place(store, wanted, start, stop):
    answer, data = asked(store, "/bucket/a%20key.bin", Range=wanted)
    assert (answer.status, data) == (206, DATA[start:stop])
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


@pytest.mark.parametrize("wanted", ["bytes=256000-256001", "bytes=9-5", "bytes=-", "lines=1-2"])
def test_a_range_that_holds_nothing_is_refused(store, wanted):
    answer, data = asked(store, "/bucket/a%20key.bin", Range=wanted)
    assert (answer.status, data) == (416, b"")


@pytest.mark.parametrize(("name", "data"), [("a%20key.bin", DATA), ("empty", b"")])
def test_a_whole_file_and_its_head_have_the_same_length(store, name, data):
    whole, received = asked(store, f"/bucket/{name}")
    head, nothing = asked(store, f"/bucket/{name}", "HEAD")
    assert received == data and nothing == b""
    assert whole.headers["Content-Length"] == head.headers["Content-Length"] == str(len(data))
    assert whole.headers["ETag"] == head.headers["ETag"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/bucket/other", 404),
        ("HEAD", "/bucket/other", 404),
        ("GET", "/bucket", 404),
        ("GET", "/../secret", 404),
        ("GET", "/%2e%2e/secret", 404),
        ("PUT", "/bucket/new", 405),
    ],
)
def test_what_is_no_file_of_the_folder_is_not_served(store, method, path, status):
    answer, data = asked(store, path, method)
    assert (answer.status, data) == (status, b"")


def test_a_connection_serves_many_requests_and_each_is_counted(store):
    before = store.counters()
    connection = http.client.HTTPConnection("127.0.0.1", store.port)
    for start in range(0, 5000, 1000):
        span = {"Range": f"bytes={start}-{start + 999}"}
        connection.request("GET", "/bucket/a%20key.bin", headers=span)
        assert connection.getresponse().read() == DATA[start : start + 1000]
    connection.close()
    spent = store.counters() - before
    # the second connection asks for the counters
    assert spent == {"requests": 5, "bytes": 5000, "connections": 2}


def test_the_share_of_requests_that_is_to_fail_fails(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    with running_store(tmp_path, fail=0.25) as store:
        statuses = [asked(store, "/file")[0].status for _ in range(200)]
        failures = store.counters()["failures"]
    assert {*statuses} == {200, 503}
    assert 25 < statuses.count(503) == failures < 75


def test_its_command_prints_the_port_and_ends_with_its_input(tmp_path):
    command = [sys.executable, "-m", "benchmarks.store_server", str(tmp_path), "--delay-ms", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=os.environ
    ) as process:
        port = int(process.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/nothing")
        assert connection.getresponse().status == 404
        connection.close()
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_limited_bandwidth_still_serves_every_byte(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    with running_store(tmp_path, delay_ms=5, bytes_per_second=1e7) as store:
        assert asked(store, "/file")[1] == DATA
