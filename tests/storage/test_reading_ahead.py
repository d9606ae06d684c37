"""Files that are read forwards, whose next blocks are under way."""

import asyncio
import random

import fsspec.asyn
import pytest
from raising import raises
from servers import web_server

from distap.storage import files, remotes
from distap.storage.files import AHEAD

SCHEMES = ["http", "s3", "gs"]
BLOCK = 1000
DATA = random.Random(0).randbytes(10 * BLOCK + 10)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "REQUEST_BYTES", BLOCK)
    (tmp_path / "a").write_bytes(DATA)
    with web_server(tmp_path) as server:
        yield server


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_next_blocks_are_asked_for_while_the_first_is_awaited(scheme, store, monkeypatch):
    monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", 20)  # of a test that fails
    storage = store.storage(scheme)
    store.faults = ["late"] * (AHEAD - 1) + ["release"]
    with storage.open("a") as file:
        assert file.read(10) == DATA[:10]
        assert storage.meter["requests"] == AHEAD
        assert file.read() == DATA[10:]
    assert store.asked() == storage.meter["requests"] == 11
    assert storage.meter["used_bytes"] == storage.meter["read_bytes"] == len(DATA)
    assert storage.meter["retries"] == 0


def test_pieces_of_any_size_are_those_of_the_file(store):
    rng = random.Random(1)
    with store.storage("http").open("a") as file:
        place = 0
        while place < len(DATA):
            size = rng.choice([1, 10, 512, BLOCK, 3 * BLOCK])
            assert file.read(size) == DATA[place : place + size]
            place += size
        assert file.read(1) == b""


def test_a_file_that_is_known_to_be_small_takes_one_request(store):
    with store.storage("http").open("a", BLOCK) as file:
        assert file.read() == DATA[:BLOCK]
    assert store.requests == [f"/a bytes=0-{BLOCK - 1}"]


@pytest.mark.parametrize("fault", ["503", "cut", "short", "elsewhere"])
def test_a_block_that_fails_is_read_alone(fault, store):
    storage = store.storage("http")
    store.faults = ["", fault, fault]
    with storage.open("a") as file:
        assert file.read() == DATA
    assert storage.meter["retries"] >= 2
    assert storage.meter["used_bytes"] == len(DATA)


def test_an_error_is_raised_where_its_block_is_read(store):
    with store.storage("http").open("a", 20 * BLOCK) as file:  # longer than it is
        assert file.read(len(DATA)) == DATA
        with raises("storage.refused", f"{store.url}/a"):
            file.read(1)


def test_blocks_that_nobody_waits_for_are_given_up_when_the_file_is_closed(store):
    async def waited():
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        return await asyncio.wait(tasks, timeout=20) if tasks else (set(), set())

    store.faults = ["", *["stall"] * 3]
    with store.storage("http").open("a") as file:
        assert file.read(1) == DATA[:1]
    _, waiting = fsspec.asyn.sync(fsspec.asyn.get_loop(), waited)
    assert waiting == set()
