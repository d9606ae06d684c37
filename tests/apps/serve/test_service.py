import asyncio
import resource
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from encodings.aliases import aliases

import httpx
import numpy as np
import pytest
from galleries import upload
from prometheus_client import generate_latest
from serving import MULTIPART, body

from distap.apps.search import open_thumbnails
from distap.apps.serve.app import Service, build_app
from distap.apps.serve.limits import ServeSettings
from distap.retrieval.descriptor_files import DescribedBy


@contextmanager
def service(searcher, **settings):
    made = Service(ServeSettings(threads=1, **settings), searcher, open_thumbnails(searcher.index))
    yield made
    made.close()


def client_of(made: Service, url: str = "http://127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(made), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=url)


@contextmanager
def nothing_found_yet(searcher):
    """Searches come as far as the index and wait there."""
    kind = type(searcher.index)
    go_on = threading.Event()
    search = kind.search

    def waiting(*arguments, **options):
        assert go_on.wait(60)
        return search(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "search", waiting)
        try:
            yield
        finally:
            go_on.set()


async def post(client, image=upload(0)) -> httpx.Response:  # noqa: B008 - the same for all
    return await client.post("/api/search", content=body(image), headers=MULTIPART)


async def until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


def test_what_finds_the_queue_full_is_told_to_come_again(searcher):
    async def story(made):
        async with client_of(made) as client:
            with nothing_found_yet(searcher):
                # one at work, two in the queue
                waiting = [asyncio.create_task(post(client)) for _ in range(3)]
                await until(lambda: made.under_way == 3)
                refused = await post(client)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["reason"] == "busy"
                assert (await client.get("/healthz")).status_code == 200
                assert (await client.get("/images/0")).status_code == 200
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3
            assert (await post(client)).status_code == 200

    with service(searcher, queue=2) as made:
        asyncio.run(story(made))


def test_a_search_that_takes_too_long_is_told_and_keeps_its_thread_until_it_ends(searcher):
    async def story(made):
        async with client_of(made) as client:
            with nothing_found_yet(searcher):
                first, second = await asyncio.gather(post(client), post(client))
                assert first.status_code == second.status_code == 503
                assert "took more than 0.2 s" in first.text + second.text
                # The thread that waits for the index is not free; what had not begun never does.
                assert made.under_way == 1
            await until(lambda: made.under_way == 0)
            assert (await post(client)).status_code == 200

    with service(searcher, queue=1, timeout_seconds=0.2) as made:
        asyncio.run(story(made))


def test_a_body_that_does_not_arrive_in_time_is_refused(searcher):
    async def story(made):
        forever = asyncio.Event()

        async def slow():
            yield body(upload(0))[:50]
            await forever.wait()

        async with client_of(made) as client:
            answer = await client.post("/api/search", content=slow(), headers=MULTIPART)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (408, "slow")
        assert made.under_way == 0

    with service(searcher, timeout_seconds=0.2) as made:
        asyncio.run(story(made))


@asynccontextmanager
async def uploads_that_stall(client, begun: bytes, number: int):
    """Tasks of uploads whose bodies begin so and go no further."""
    forever = asyncio.Event()
    arrived = asyncio.Semaphore(0)

    async def stalling():
        yield begun
        arrived.release()
        await forever.wait()

    tasks = []
    for _ in range(number):
        tasks.append(
            asyncio.create_task(client.post("/api/search", content=stalling(), headers=MULTIPART))
        )
        await arrived.acquire()
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_uploads_that_trickle_keep_no_search_out_and_the_slowest_gives_way(searcher):
    async def story(made):
        async with (
            client_of(made) as client,
            uploads_that_stall(client, body(upload(0))[:50], 3) as stalled,
        ):
            assert made.under_way == 0
            async with asyncio.timeout(60):
                while (await post(client)).status_code == 503:  # until one is behind
                    await asyncio.sleep(0.05)
            slowest = await stalled[0]
            assert (slowest.status_code, slowest.json()["error"]["reason"]) == (408, "slow")
            assert [task.done() for task in stalled] == [True, False, False]

    with service(searcher, queue=2, timeout_seconds=300) as made:
        asyncio.run(story(made))


def test_uploads_that_arrive_fast_enough_give_no_place_to_new_ones(searcher):
    async def story(made):
        # what a slow client would need a quarter of an hour for
        begun = body(bytes(1_000_000))[:-40]
        async with client_of(made) as client, uploads_that_stall(client, begun, 3) as stalled:
            refused = await post(client)
            assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "busy")
            assert not any(task.done() for task in stalled)
            key = next(iter(searcher.index.rows))
            assert (await client.get("/api/search", params={"key": key})).status_code == 200

    with service(searcher, queue=2, timeout_seconds=300) as made:
        asyncio.run(story(made))


def test_an_upload_for_which_the_disk_has_no_room_is_told_so_in_one_line(searcher, caplog):
    async def story(made):
        async with client_of(made) as client:
            answer = await post(client, bytes(3_000_000))
            assert (answer.status_code, answer.json()["error"]["reason"]) == (507, "disk_full")
            assert (await post(client)).status_code == 200

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        with service(searcher) as made:
            asyncio.run(story(made))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (
        "an upload cannot be kept while it arrives" in line.getMessage() and line.exc_info is None
    )


def test_no_charset_is_a_fault_of_the_server(searcher, caplog):
    async def story(made):
        body = b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n1\r\n--b--\r\n'
        async with client_of(made) as client:
            for charset in sorted({*aliases.values(), "undefined", "idna", "none"}):
                kind = {"Content-Type": f"multipart/form-data; boundary=b; charset={charset}"}
                answer = await client.post("/api/search", content=body, headers=kind)
                assert answer.status_code in (400, 422), charset

    with service(searcher) as made:
        asyncio.run(story(made))
    assert not [record for record in caplog.records if record.name == "distap"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {"Host": "rebound.example"}, 400),
        ("GET", "/", {"Host": "192.168.1.5:8000"}, 400),
        ("GET", "/", {"Host": "search.example:8000"}, 200),
        # a link from elsewhere
        ("GET", "/", {"Host": "LOCALHOST:8000", "Sec-Fetch-Site": "cross-site"}, 200),
        ("GET", "/readyz", {"Host": "10.1.2.3:8000"}, 200),  # a probe asks by a pod's address
        ("GET", "/metrics", {"Host": "10.1.2.3:8000"}, 400),
        # the address of this connection, as Prometheus asks
        ("GET", "/metrics", {"Host": "10.9.8.7:8000"}, 200),
        ("POST", "/api/search", {"Host": "127.0.0.1"}, 200),
        ("POST", "/api/search", {"Host": "rebound.example"}, 400),
        ("GET", "/", {"Host": "["}, 400),
    ],
)
def test_other_names_are_refused(searcher, method, path, headers, status):
    async def ask() -> httpx.Response:
        async with client_of(made, "http://10.9.8.7") as client:
            content = (
                {"content": body(upload(0)), "headers": MULTIPART | headers}
                if method == "POST"
                else {}
            )
            return await client.request(method, path, **{"headers": headers} | content)

    with service(searcher, allowed_host=["search.example"]) as made:
        assert asyncio.run(ask()).status_code == status


def test_a_fault_of_the_server_is_told_without_its_traceback(searcher, monkeypatch, caplog):
    async def story(made):
        async with client_of(made) as client:
            answer = await post(client)
            assert answer.status_code == 500 and "secret" not in answer.text
            assert answer.json()["error"]["reason"] == "failed"
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = (await client.get("/metrics")).text
            assert 'requests_total{route="/api/search",status="500"} 1.0' in text

    def broken(*arguments, **options):
        raise ValueError("a secret")

    monkeypatch.setattr(type(searcher.index), "search", broken)
    with service(searcher) as made:
        asyncio.run(story(made))
    assert "a secret" in caplog.text  # in the log


def test_a_client_that_leaves_gives_its_place_back(searcher):
    async def story(made):
        app = build_app(made)
        messages = [{"type": "http.request", "body": body(upload(0))[:50], "more_body": True}]

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        headers = [
            (name.lower().encode(), value.encode())
            for name, value in (MULTIPART | {"Host": "localhost"}).items()
        ]
        record = {
            "method": "POST",
            "path": "/api/search",
            "raw_path": b"/api/search",
            "query_string": b"",
        }
        scope = {
            "type": "http",
            "headers": headers,
            "scheme": "http",
            "server": ("test", 80),
            **record,
        }
        await app(
            {**scope, "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"}},
            receive,
            send,
        )
        assert made.under_way == 0 and not sent
        assert 'status="499"' in generate_latest(made.metrics.registry).decode()

    with service(searcher) as made:
        asyncio.run(story(made))


@pytest.mark.parametrize(
    ("sizing", "scales", "given", "expected"),
    [
        ("crop 224", (1.0,), None, 50_000_000),
        ("original", (1.0,), None, 4_000_000),
        ("original", (2.0, 1.0), None, 1_000_000),
        ("original", (0.5,), None, 4_000_000),
        ("original", (1.0,), 123, 123),
    ],
)
def test_an_upload_has_as_many_pixels_as_the_network_can_see(sizing, scales, given, expected):
    assert (
        ServeSettings(max_pixels=given).pixels_of(DescribedBy("network", sizing, scales))
        == expected
    )


def test_hits_are_filtered_and_grouped_and_a_misspelt_parameter_is_refused(searcher):
    images = searcher.index.images
    parity = np.array([("even", "odd")[row % 2] for row in range(len(images))])
    columns = {"parity": parity, "price": np.arange(len(images)).astype(str)}
    index = replace(searcher.index, images=replace(images, columns=columns))
    key = str(images.keys[0])

    async def story(made):
        async with client_of(made) as client:

            async def get(**parameters):
                return await client.get("/api/search", params={"key": key, **parameters})

            hits = (await get(where=["parity=even", "price<10"], k=20)).json()["hits"]
            assert {hit["columns"]["price"] for hit in hits} == {2, 4, 6, 8}
            hits = (await get(group="parity", k=20)).json()["hits"]
            assert [hit["columns"]["parity"] for hit in hits] == ["odd"]
            for parameters, words in (
                ({"category": "shoes"}, ("category", "where", "group")),
                ({"where": "colour=red"}, ("colour", "parity")),
                ({"group": "colour"}, ("colour", "parity")),
                ({"where": "parity"}, ("parity",)),
            ):
                answer = await get(**parameters)
                assert answer.status_code == 422
                assert all(word in answer.json()["error"]["message"] for word in words)
            page = (await client.get("/")).text
            assert 'id="where"' in page and "<option>parity</option>" in page

    with service(replace(searcher, index=index)) as made:
        asyncio.run(story(made))


def test_a_hit_without_a_picture_has_no_link(searcher, tmp_path):
    made = Service(
        ServeSettings(threads=1), searcher, open_thumbnails(searcher.index, str(tmp_path / "none"))
    )

    async def story():
        async with client_of(made) as client:
            hits = (await post(client)).json()["hits"]
            assert hits and not any("picture" in hit for hit in hits)

    asyncio.run(story())
    made.close()


def test_the_page_filters_by_the_columns_of_the_generation_that_is_served(searcher):
    async def pages():
        with service(searcher) as made:
            async with client_of(made) as client:
                before = (await client.get("/")).text
                images = searcher.index.images
                columns = {"colour": np.full(len(images), "red")}
                index = replace(searcher.index, images=replace(images, columns=columns))
                made.swap(index, made.served.pictures)
                return before, (await client.get("/")).text

    before, after = asyncio.run(pages())
    assert "colour" not in before and "<option>colour</option>" in after
