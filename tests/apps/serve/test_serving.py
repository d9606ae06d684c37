import asyncio
import json
import os
import signal
import socket
import sys

import httpx
import numpy as np
import pytest
from commands import distap
from galleries import upload
from launching import started
from serving import BAD, MULTIPART, body, resident, serving
from sockets import Listening, sockets_of

from distap.retrieval.searching import Hit

ALIKE = 1e-5  # similarities, whatever the number of threads


def require_right(answer: httpx.Response, all_names: list[Hit], k: int) -> None:
    """The answer has the first of all hits that the network and the index give directly."""
    assert answer.status_code == 200, answer.text
    hits = answer.json()["hits"]
    similarity = {hit.key: hit.similarity for hit in all_names}
    np.testing.assert_allclose(
        [hit["similarity"] for hit in hits],
        [hit.similarity for hit in all_names[:k]],
        rtol=0,
        atol=ALIKE,
    )
    assert [hit["rank"] for hit in hits] == list(range(1, len(all_names[:k]) + 1))
    assert len({hit["key"] for hit in hits}) == len(hits)
    assert all(abs(hit["similarity"] - similarity[hit["key"]]) < ALIKE for hit in hits)


def require_refused(answer: httpx.Response, status: int, reason: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"]) == (status, reason), answer.text
    assert error["message"] and "Traceback" not in answer.text


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_an_upload_is_answered_as_the_network_and_the_index_would(url, searcher, form):
    image = upload(7, form)
    answer = httpx.post(f"{url}/api/search", files={"image": ("x", image)}, params={"k": 5})
    require_right(answer, searcher.by_image(image, 40), 5)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_is_refused_with_what_to_do(url, name):
    content, headers, status, reason = BAD[name]
    require_refused(
        httpx.post(f"{url}/api/search", content=content, headers=headers), status, reason
    )


def test_a_body_without_a_length_is_limited_while_it_is_read(url):
    sent = 0

    def endless():
        nonlocal sent
        while sent < 3_000_000:
            sent += 100_000
            yield bytes(100_000) if sent > 100_000 else body(bytes(50_000))[:-40]

    require_refused(
        httpx.post(f"{url}/api/search", content=endless(), headers=MULTIPART), 413, "too_large"
    )


def test_a_key_finds_what_is_most_similar_to_it(url, searcher):
    key = "<i>apple/кот 0.png"
    hits = httpx.get(f"{url}/api/search", params={"key": key, "k": 3}).json()["hits"]
    expected = searcher.by_key(key, 3)
    assert [hit["key"] for hit in hits] == [hit.key for hit in expected]
    assert [hit["class"] for hit in hits] == [hit.class_name for hit in expected]


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ({}, 422, "bad_request"),
        ({"key": "x", "k": 0}, 422, "bad_request"),
        ({"key": "x" * 5000}, 422, "bad_request"),
    ],
)
def test_a_bad_key_or_k_is_refused(url, query, status, reason):
    require_refused(httpx.get(f"{url}/api/search", params=query), status, reason)


def test_an_unknown_key_is_not_answered_with_a_path_of_the_server(url):
    answer = httpx.get(f"{url}/api/search", params={"key": "no/such"})
    require_refused(answer, 404, "not_found")
    assert answer.json()["error"]["message"] == "the index has no image with the key 'no/such'"


def test_pictures_are_had_by_row_only(url):
    picture = httpx.get(f"{url}/images/3")
    assert picture.headers["content-type"] == "image/jpeg" and picture.content.startswith(
        b"\xff\xd8"
    )
    require_refused(httpx.get(f"{url}/images/40"), 404, "not_found")
    require_refused(httpx.get(f"{url}/images/-1"), 404, "not_found")
    for path in ("a", "0.jpg", "0x1", "1.5"):
        require_refused(httpx.get(f"{url}/images/{path}"), 422, "bad_request")
    for path in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd"):
        assert httpx.get(f"{url}/images/{path}").status_code in (404, 422)


def test_every_answer_has_security_headers_and_errors_have_one_form(url):
    for path, status in (
        ("/", 200),
        ("/search.js", 200),
        ("/healthz", 200),
        ("/nothing", 404),
        ("/docs", 404),
    ):
        answer = httpx.get(f"{url}{path}")
        assert answer.status_code == status
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers
    require_refused(httpx.get(f"{url}/nothing"), 404, "not_found")
    require_refused(httpx.delete(f"{url}/api/search"), 405, "bad_request")


def counted(url: str, name: str) -> float:
    """Sum of a metric's series whose line begins so."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_metrics_count_requests_and_refused_uploads(url):
    of_status = 'distap_search_requests_total{route="/api/search",status="400"}'
    of_reason = 'distap_search_uploads_refused_total{reason="empty"}'
    before = counted(url, of_status), counted(url, of_reason)
    httpx.post(f"{url}/api/search", files={"image": b""})
    assert (counted(url, of_status), counted(url, of_reason)) == (before[0] + 1, before[1] + 1)
    assert counted(url, "distap_search_index_images") == 40
    assert counted(url, "distap_search_requests_in_flight") == 1  # the one that asks
    httpx.get(f"{url}/made/up/1")
    assert "made" not in httpx.get(f"{url}/metrics").text


def test_under_load_no_answer_is_wrong_and_memory_stays_bounded(served, searcher):
    url, job = served
    images = [upload(seed, form) for seed, form in enumerate(["PNG", "JPEG", "WEBP"] * 8)]
    expected = [searcher.by_image(image, 40) for image in images]
    bad = list(BAD.values())

    async def one(client: httpx.AsyncClient, number: int) -> None:
        if number % 3 == 2:
            content, headers, status, reason = bad[number // 3 % len(bad)]
            require_refused(
                await client.post("/api/search", content=content, headers=headers), status, reason
            )
            return
        number_of_image = number % len(images)
        k = 1 + number % 40
        answer = await client.post(
            "/api/search", params={"k": k}, content=body(images[number_of_image]), headers=MULTIPART
        )
        require_right(answer, expected[number_of_image], k)
        if number % 5 == 0:
            picture = await client.get(answer.json()["hits"][0]["picture"])
            assert picture.content.startswith(b"\xff\xd8")

    async def many(total: int) -> None:
        waiting = iter(range(total))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def worker() -> None:
                for number in waiting:
                    await one(client, number)

            await asyncio.gather(*(worker() for _ in range(16)))

    asyncio.run(many(100))
    before = resident(job.process.pid)
    asyncio.run(many(300))
    assert resident(job.process.pid) - before < 64 * 2**20
    assert counted(url, 'distap_search_requests_total{route="/api/search",status="500"}') == 0
    assert counted(url, "distap_search_requests_in_flight") == 1
    assert "Traceback" not in job.said


def test_requests_that_are_no_http_leave_no_lines_in_the_log(served):
    url, job = served
    host, port = url.removeprefix("http://").split(":")
    before = job.said
    for sent in (
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(sent)
            assert client.recv(65536).startswith(b"HTTP/1.1 400")
    # so that a line would have been written
    assert counted(url, "distap_search_requests_total") > 0
    assert job.said == before


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGHUP]
)
def test_asked_to_stop_it_finishes_what_is_under_way(gallery, searcher, tmp_path, number):
    image = upload(9)
    content = body(image)
    with serving(gallery, tmp_path) as (url, job):
        host, port = url.removeprefix("http://").split(":")
        head = (
            f"POST /api/search?k=3 HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
        )
        head += f"Content-Type: {MULTIPART['Content-Type']}\r\n\r\n"
        with socket.create_connection((host, int(port))) as upload_socket:
            upload_socket.sendall(head.encode() + content[:100])
            job.wait_until(lambda: counted(url, "distap_search_requests_in_flight") == 2)
            # as a service manager does, which knows all processes of a service
            for pid in job.left():
                os.kill(pid, number)
            job.wait_until(lambda: is_closed(host, int(port)))
            upload_socket.sendall(content[100:])
            answer = b"".join(iter(lambda: upload_socket.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        hits = json.loads(answer.partition(b"\r\n\r\n")[2])["hits"]
        assert [hit["key"] for hit in hits] == [hit.key for hit in searcher.by_image(image, 3)]
        assert job.status() == 0, job.said
        job.wait_until_none_is_left()


def is_closed(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_an_address_that_cannot_be_listened_on_is_named(gallery, url, monkeypatch, capsys):
    port = url.rpartition(":")[2]
    assert (
        distap(monkeypatch, "serve", gallery.index, "--checkpoint", gallery.run, "--port", port)
        == 2
    )
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_without_its_extra_serving_says_what_to_install(gallery, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("distap.apps.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert distap(monkeypatch, "serve", gallery.index, "--checkpoint", gallery.run) == 2
    assert "pip install 'distap[serve]'" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_server_alone_listens_at_its_address_alone(served):
    url, job = served
    held = sockets_of(job.left())
    assert len(held) > 2  # its decoders, too
    listening = {pid: sockets for pid, sockets in held.items() if sockets}
    assert listening == {job.process.pid: {Listening("127.0.0.1", httpx.URL(url).port)}}


@pytest.mark.cluster
@pytest.mark.slow
def test_strangers_do_not_reach_a_server(gallery, hosts, tmp_path):
    command = ["-m", "distap.cli", "serve", gallery.index, "--checkpoint", gallery.run]
    with started(hosts.on(0, [sys.executable, *map(str, command)]), tmp_path) as job:
        job.wait_until(lambda: " on http://" in job.said)
        [sockets] = [held for held in sockets_of(job.left()).values() if held]
        assert sockets == {Listening("127.0.0.1", 8000)}
        assert hosts.answering(0, sockets) == sockets
        assert hosts.answering(1, {Listening(hosts.addresses[0], 8000)}) == set()
