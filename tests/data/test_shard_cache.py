import logging
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import pytest
from images import wait_for_cache
from servers import web_server

from distap.data.loading.indexed import Reader
from distap.data.pixel_and_cache_settings import CacheSettings
from distap.data.shards.load_index import load_index
from distap.errors import DistapError
from distap.storage.files import LocalStorage
from distap.storage.remotes import RemoteSettings

PLENTY = 10**9
QUICK = RemoteSettings(attempts=2, timeout_seconds=20, backoff_seconds=0)


@pytest.fixture(autouse=True)
def _messages_reach_caplog(monkeypatch):
    monkeypatch.setattr(logging.getLogger("distap"), "propagate", True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def reader(source, folder, max_bytes=PLENTY, remote=QUICK):
    return Reader(source, load_index(source, remote), remote=remote, cache=CacheSettings(folder, max_bytes))


def read_all(reader):
    """Every image; what it took by the time that nothing is fetched any more."""
    data = [reader.data(sample) for sample in range(len(reader.index))]
    wait_for_cache()
    return data, reader.storage.meter.take()


def kept(folder, suffix=".tar"):
    return sorted(path for path in folder.rglob(f"*{suffix}"))


def test_shards_are_kept_and_read_from_disk_the_second_time(shards, folder):
    expected, _ = read_all(reader(shards, folder / "other"))
    with web_server(shards) as server:
        first = reader(server.url, folder)
        data, traffic = read_all(first)
        assert data == expected
        assert traffic.cache_hits + traffic.cache_misses == 9
        assert traffic.cache_misses >= 1
        server.requests.clear()
        again, traffic = read_all(pickle.loads(pickle.dumps(first)))
        assert again == expected
        assert (traffic.cache_hits, traffic.cache_misses) == (9, 0)
        assert traffic.read_bytes == sum(map(len, expected))
        assert server.requests == []
    names = first.index.shard_name.tolist()
    assert {path.read_bytes() for path in kept(folder)} == {(shards / name).read_bytes() for name in names}


def test_each_shard_is_fetched_once_for_all_processes_of_a_host(shards, folder):
    with web_server(shards) as server:
        whole = reader(server.url, folder)
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=read_all, args=(whole,)) for _ in range(4)]
        server.requests.clear()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        sizes = dict(zip(whole.index.shard_name.tolist(), whole.index.shard_size.tolist(), strict=True))
        for name, size in sizes.items():
            assert sum(f"/{name} bytes=0-{size - 1}" == request for request in server.requests) == 1
    assert len(kept(folder)) == 3
    assert kept(folder, ".tmp") == []


def test_what_does_not_fit_is_read_from_its_source_and_said_once(shards, folder, caplog):
    sizes = load_index(shards).shard_size.tolist()
    small = reader(shards, folder, max_bytes=sizes[0] + sizes[1] // 2)
    for _ in range(3):
        _, traffic = read_all(small)
        assert [path.stat().st_size for path in kept(folder)] == [sizes[0]]
    assert (traffic.cache_hits, traffic.cache_misses) == (4, 5)
    assert caplog.text.count("no more shards are kept: data.cache.max_bytes is") == 1
    (folder / "older").mkdir()
    kept(folder)[0].rename(folder / "older" / "000000.tar")  # as an earlier version kept it
    read_all(reader(shards, folder, max_bytes=sizes[0] + sizes[1] // 2))
    assert kept(folder) == [folder / "older" / "000000.tar"]


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_kept_shard_is_fetched_again_and_its_image_read_from_the_source(shards, folder, damage):
    first = reader(shards, folder)
    expected, _ = read_all(first)
    damaged = kept(folder)[0]
    shard = first.index.shard_sha256.tolist().index(damaged.parent.name)
    sample = first.index.shard.tolist().index(shard)
    offset = int(first.index.offset[sample])
    if damage == "flip":
        flip(damaged, offset + 5)
    else:
        os.truncate(damaged, offset + 5)
    assert first.data(sample) == expected[sample]
    wait_for_cache()
    assert damaged.read_bytes() == (shards / str(first.index.shard_name[shard])).read_bytes()
    first.storage.meter.take()
    assert first.data(sample) == expected[sample]
    assert first.storage.meter.take().cache_hits == 1


def test_a_shard_that_is_not_the_one_that_was_indexed_is_not_kept(shards, folder, caplog):
    whole = reader(shards, folder)
    flip(shards / "000001.tar", 5)  # in a header: every image is as it was
    with caplog.at_level(logging.WARNING, "distap"):
        data, _ = read_all(whole)
    assert len(data) == 9
    assert len(kept(folder)) == 2
    assert "000001.tar: its bytes have changed since they were indexed" in caplog.text
    assert kept(folder, ".tmp") == []


def fetch_and_be_killed(whole):
    """Ends in the middle of a download."""
    LocalStorage.read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    assert whole.cache.read(0, 0, 1) is None
    wait_for_cache()


def test_a_killed_download_leaves_nothing_that_looks_whole(shards, folder):
    whole = reader(shards, folder)
    process = multiprocessing.get_context("fork").Process(target=fetch_and_be_killed, args=(whole,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(kept(folder, ".tmp")) == 1
    assert kept(folder) == []
    assert read_all(whole)[1].cache_hits < 9
    assert len(kept(folder)) == 3
    assert kept(folder, ".tmp") == []


def test_a_source_that_breaks_off_leaves_reading_to_training(shards, folder):
    with web_server(shards) as server:
        whole = reader(server.url, folder)
        expected = whole.storage.read("000000.tar", 0, 100)
        server.faults = ["cut"] * 2
        assert whole.cache.read(0, 0, 1) is None
        wait_for_cache()
        assert kept(folder, ".tmp") == kept(folder) == []
        assert whole.storage.read("000000.tar", 0, 100) == expected


def test_a_folder_that_cannot_be_used_is_an_error(shards, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DistapError, match=r"file: data\.cache\.folder cannot be used"):
        reader(shards, tmp_path / "file")


def test_a_full_disk_keeps_less_and_goes_on(shards, small_disk, caplog):
    disk = small_disk("64k")
    (disk / "other").write_bytes(bytes(30_000))
    with caplog.at_level(logging.WARNING, "distap"):
        expected, _ = read_all(reader(shards, Path(f"{disk}-apart")))
        assert read_all(reader(shards, disk / "cache"))[0] == expected
    assert caplog.text.count("no more shards are kept: No space left on device") == 1
    assert 0 < len(kept(disk)) < 3
    assert kept(disk, ".tmp") == []
