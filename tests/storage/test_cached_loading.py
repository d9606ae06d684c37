"""Shards behind a URL that a host keeps on its disk, filled ahead by the plan of batches."""

import errno
import hashlib
import os
import signal
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from images import AUGMENTATION, pack_eight_shards
from raising import raises
from ranks import on_ranks
from servers import s3_server, web_server

from distap.data.loading.cached import CachedShards
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob
from distap.data.loading.streamed import StreamedSource
from distap.data.sampling import PByKSampling, RandomSampling
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch
from distap.storage.cache import CacheSettings
from distap.storage.locations import parse_source
from distap.world import ALONE, World

IMAGES = 48
BATCH = 12
PASSES = 3
STEPS = PASSES * IMAGES // BATCH
SAMPLINGS = {
    "random": RandomSampling(batch_size=BATCH, window=2),
    "p_by_k": PByKSampling(classes=4, images=3, window=2),
    "p_by_k of all": PByKSampling(classes=4, images=3),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack_eight_shards(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def total(packed):
    return int(load_index(packed).shard_size.sum())


def opened(source, sampling, world=ALONE, source_kind=None, **settings):
    transform = AUGMENTATION.transform(16)
    job = LoadingJob(parse_source(source), sampling, 0, ((0, 16, transform),), chunk=5, **settings)
    return (source_kind or IndexedSource()).open(job, world, Stopwatch())


def digests(images, steps=range(STEPS), traffic=None):
    """What each step reads: samples and the hash of their pixels, in the order of slots."""
    batches = []
    with closing(images.shares(steps)) as shares:
        for share in shares:
            rows = len(images.places)
            pixels = share.images(slice(0, rows)).clone().numpy()
            order = np.arange(images.size) if share.order is None else share.order.numpy()
            slots = order[images.places.start :: images.places.step].tolist()
            read = [hashlib.sha256(image.tobytes()).hexdigest() for image in pixels]
            batches.append(list(zip(slots, share.samples.tolist(), read, strict=True)))
            assert not share.failures
            if traffic is not None:
                traffic.update(share.traffic)
    return batches


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampling(request):
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def expected(packed, sampling):
    return digests(opened(packed, sampling))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("store", ["http", "s3", "disk"])
def test_the_batches_are_those_of_the_disk(
    packed, expected, sampling, total, store, workers, tmp_path
):
    cache = CacheSettings(tmp_path / "cache", total)
    if store == "disk":
        assert digests(opened(packed, sampling, workers=workers, cache=cache)) == expected
        return
    if store == "http":
        with web_server(packed) as server:
            assert digests(opened(server.url, sampling, workers=workers)) == expected
            assert digests(opened(server.url, sampling, workers=workers, cache=cache)) == expected
        return
    from test_reads import upload

    with s3_server():
        url = upload(packed, f"cached-{workers}-{tmp_path.name}")
        assert digests(opened(url, sampling, workers=workers)) == expected
        assert digests(opened(url, sampling, workers=workers, cache=cache)) == expected


def test_each_shard_leaves_the_store_once_if_the_cache_holds_all(
    packed, expected, sampling, total, tmp_path
):
    traffic = Counter()
    with web_server(packed) as server:
        images = opened(
            server.url, sampling, workers=1, cache=CacheSettings(tmp_path / "cache", total)
        )
        server.requests.clear()
        assert digests(images, traffic=traffic) == expected
        asked = Counter(request.split()[0] for request in server.requests)
    assert set(asked.values()) == {1} and len(asked) == 8
    assert traffic["cache_hits"] == STEPS * BATCH and traffic["cache_misses"] == 0


def test_a_small_cache_drops_the_shards_of_windows_that_are_over(packed, tmp_path):
    sampling = SAMPLINGS["p_by_k"]
    largest = int(load_index(packed).shard_size.max())
    cache = CacheSettings(tmp_path / "cache", 7 * largest)
    with web_server(packed) as server:
        images = opened(server.url, sampling, workers=1, cache=cache, prefetch=1, requests=1)
        assert digests(images) == digests(opened(packed, sampling))
    files = [path.stat().st_size for path in cache.folder.iterdir() if len(path.name) == 64]
    assert 1 < len(files) < 8 and sum(files) <= cache.bytes


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8, 10])
def test_a_training_that_goes_on_reads_the_same(packed, expected, sampling, total, tmp_path, step):
    cache = CacheSettings(tmp_path / "cache", total)
    with web_server(packed) as server:
        digests(opened(server.url, sampling, cache=cache), steps=range(step))
        images = opened(server.url, sampling, workers=1, cache=cache)
        later = digests(images, steps=range(step, STEPS))
    assert later == expected[step:]


@pytest.mark.parametrize("step", range(STEPS))
def test_a_training_goes_on_at_any_step_on_any_number_of_ranks(packed, expected, sampling, step):
    ranks = 1 + step % 3
    later = [
        digests(opened(packed, sampling, World(r, ranks)), range(step, STEPS)) for r in range(ranks)
    ]
    batches = [sorted(chain.from_iterable(shares)) for shares in zip(*later, strict=True)]
    assert batches == expected[step:]


def test_each_image_comes_once_in_a_pass(expected):
    for first in range(0, STEPS, IMAGES // BATCH):
        batches = expected[first : first + IMAGES // BATCH]
        samples = sorted(sample for batch in batches for _, sample, _ in batch)
        assert samples == list(range(IMAGES))


def on_hosts(world, url, sampling, folder, limit, steps=range(STEPS)):
    """Each rank on a host of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # of this process alone
    world = replace(world, local_rank=0)
    cache = CacheSettings(folder / f"host-{world.rank}", limit)
    return digests(opened(url, sampling, world, workers=1, cache=cache), steps=steps)


@pytest.mark.parametrize("ranks", [2, 3])
def test_hosts_share_the_shards_among_them(packed, expected, sampling, total, tmp_path, ranks):
    with web_server(packed) as server:
        answers = on_ranks(ranks, on_hosts, server.url, sampling, tmp_path, total)
        read = sum(
            int(last) - int(first) + 1
            for request in server.requests
            if "bytes=" in request and ".tar" in request
            for first, last in [request.split("=")[1].split("-")]
        )
    batches = [sorted(chain.from_iterable(parts)) for parts in zip(*answers, strict=True)]
    assert batches == [sorted(batch) for batch in expected]
    # In batches of 12, the run of a host is often not that of its shards, which it reads alone.
    assert read < ranks * total + 0.5 * total


def on_one_host(world, url, sampling, folder, limit):
    cache = CacheSettings(folder / "host", limit)
    return digests(opened(url, sampling, world, workers=1, cache=cache))


def test_the_ranks_of_a_host_share_its_cache(packed, expected, sampling, total, tmp_path):
    with web_server(packed) as server:
        answers = on_ranks(2, on_one_host, server.url, sampling, tmp_path, total)
        asked = Counter(path.split()[0] for path in server.requests if "bytes=" in path)
    batches = [sorted(chain.from_iterable(parts)) for parts in zip(*answers, strict=True)]
    assert batches == [sorted(batch) for batch in expected]
    assert {count for name, count in asked.items() if name.endswith(".tar")} == {1}


def test_two_trainings_share_a_cache(packed, expected, sampling, total, tmp_path):
    with web_server(packed) as server:
        answers = on_ranks(2, alone, server.url, sampling, tmp_path, total)
        asked = Counter(path.split()[0] for path in server.requests if "bytes=" in path)
    assert answers == [expected, expected]
    assert {count for name, count in asked.items() if name.endswith(".tar")} == {1}


def alone(_, *arguments):
    return on_one_host(ALONE, *arguments)


def test_a_shard_that_is_here_is_read_whoever_keeps_it(
    packed, sampling, total, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cache = CacheSettings(tmp_path / "cache", total)
    with web_server(packed) as server:
        digests(opened(server.url, sampling, cache=cache))
    # Without the store: every shard lies in the cache, also those of the other host.
    images = [opened(packed, sampling, World(rank, 2)) for rank in range(2)]
    for rank, share in enumerate(images):
        shards = CachedShards(cache, share.read_from, share.plan, World(rank, 2))
        share.read_from.storage.disk = tmp_path / "gone"
        batch = share.plan.batch(3)
        order = share.plan.order(3, 2)
        files = shards.files(3, batch[order[rank::2]].tolist(), 4)
        assert all(isinstance(file, bytes) for file in files)


def test_a_disk_that_fails_loses_nothing(packed, expected, sampling, total, tmp_path, monkeypatch):
    def failing(*arguments):
        monkeypatch.setattr(os, "pread", pread)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pread = os.pread
    with web_server(packed) as server:
        images = opened(server.url, sampling, cache=CacheSettings(tmp_path / "cache", total))
        monkeypatch.setattr(os, "pread", failing)
        assert digests(images) == expected


def test_bits_that_flip_on_the_disk_are_found_and_fetched_again(
    packed, expected, total, tmp_path, caplog, sampling
):
    cache = CacheSettings(tmp_path / "cache", total)
    with web_server(packed) as server:
        digests(opened(server.url, sampling, cache=cache))
        for path in cache.folder.iterdir():
            if len(path.name) == 64:
                data = bytearray(path.read_bytes())
                data[700::500] = bytes(value ^ 8 for value in data[700::500])
                path.write_bytes(data)
        assert digests(opened(server.url, sampling, cache=cache)) == expected
    assert "has changed on this host's disk" in caplog.text


def test_a_store_that_fails_now_and_then_loses_nothing(packed, expected, total, tmp_path, sampling):
    cache = CacheSettings(tmp_path / "cache", total)
    with web_server(packed) as server:
        images = opened(server.url, sampling, workers=1, cache=cache)
        server.faults = ["503", "", "cut", "", "flip", "", "short", "", "503"]
        assert digests(images) == expected
        images = opened(server.url, sampling, workers=1)
        server.faults = ["503", "", "cut", "", "flip", "", "short", "", "503"]
        assert digests(images) == expected


def test_shards_that_differ_from_their_index_are_read_image_by_image(
    packed, total, tmp_path, caplog
):
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in packed.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".tar":
            data[-1] = 1  # behind the images
        (changed / path.name).write_bytes(data)
    sampling = SAMPLINGS["random"]
    with web_server(changed) as server:
        cache = CacheSettings(tmp_path / "cache", total)
        assert digests(opened(server.url, sampling, cache=cache)) == digests(
            opened(packed, sampling)
        )
    assert "data check" in caplog.text


def test_a_filler_that_is_killed_is_told_and_workers_go_on(
    packed, expected, total, tmp_path, caplog, sampling
):
    with web_server(packed) as server:
        images = opened(
            server.url, sampling, workers=1, cache=CacheSettings(tmp_path / "cache", total)
        )
        batches = []
        with closing(images.shares(range(STEPS))) as shares:
            for share in shares:
                share.images(slice(0, BATCH))
                batches.append(share.samples.tolist())
                if share.step == 1:
                    os.kill(images.filler.pid, signal.SIGKILL)
                    images.filler.join()
    assert batches == [[sample for _, sample, _ in batch] for batch in expected]
    assert "was lost" in caplog.text


def test_a_cache_that_is_too_small_is_refused_with_the_number_that_suffices(
    packed, total, tmp_path
):
    cache = CacheSettings(tmp_path / "cache", total - 1)
    with raises("data.cache_too_small", f"{total:,}", "sampling.window"):
        opened(packed, SAMPLINGS["p_by_k of all"], cache=cache)
    # What holds the whole data set holds any window.
    wide = PByKSampling(classes=4, images=3, window=16)
    assert opened(packed, wide, cache=replace(cache, bytes=total)).shards
    # Two windows, one shard on its way, and two that a worker reads ahead.
    largest = int(load_index(packed).shard_size.max())
    cache = replace(cache, bytes=7 * largest - 1)
    with raises("data.cache_too_small", f"{7 * largest:,}", "sampling.window"):
        opened(packed, SAMPLINGS["p_by_k"], cache=cache, workers=1, prefetch=1, requests=1)


def test_what_has_no_shards_with_an_index_takes_no_cache(packed, tmp_path):
    cache = CacheSettings(tmp_path / "cache", 10**9)
    with raises("data.no_cache", "indexed"):
        opened(packed, SAMPLINGS["random"], source_kind=StreamedSource(), cache=cache)
    with raises("data.no_cache", "data pack"):
        opened(f"imagefolder:{packed.parent / 'images'}", RandomSampling(batch_size=4), cache=cache)
