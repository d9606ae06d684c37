"""`benchmarks data --store`: what its readers ask a store for, and what it prints."""

import shutil

import pytest

from benchmarks.data import DataBenchmark
from benchmarks.store.hosts import PASSES, HostReads, bytes_of_passes
from benchmarks.store.options import StoreOptions
from benchmarks.store.readers import ONE_BY_ONE, STREAMING, loading_job, readers
from benchmarks.store.shards import BY_CLASS, MIXED, fill
from benchmarks.store_server import running_store
from distap.data.loading.indexed import IndexedSource
from distap.stopwatch import Stopwatch
from distap.world import World

TINY = DataBenchmark(
    store=True,
    delay=[0, 5],
    store_images=60,
    store_side=96,
    store_size=32,
    images_per_shard=10,
    batch_classes=4,
    chunk=8,
    seconds=0.1,
    window=2,
    cache=2,
    workers=1,
    rounds=1,
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("store"), TINY)


def asked_for(filled, delay, shards, **settings):
    """What a store counts while three batches are read from it, and the images."""
    with running_store(filled.folder, delay) as store:
        job = loading_job(TINY, f"{store.url}/{shards}", 1, **settings)
        images = IndexedSource().open(job, World(), Stopwatch())
        before = store.counters()
        names = []
        for share in images.shares(range(3)):
            for start in range(0, images.size, TINY.chunk):
                share.images(slice(start, start + TINY.chunk))
            names += share.names
        return store.counters() - before, names


@pytest.mark.parametrize("delay", [0, 5])
def test_images_at_once_are_the_same_bytes_as_one_by_one(filled, delay):
    alone, first_names = asked_for(filled, delay, MIXED, requests=1)
    together, names = asked_for(filled, delay, MIXED)
    assert names == first_names and len(names) == 3 * TINY.batch_classes * 4
    assert together["bytes"] == alone["bytes"] > 0
    assert 0 < together["requests"] <= alone["requests"]


def test_images_of_a_class_that_lie_together_take_fewer_requests(filled):
    mixed, _ = asked_for(filled, 0, MIXED)
    by_class, names = asked_for(filled, 0, BY_CLASS)
    assert 0 < by_class["requests"] < mixed["requests"] < len(names)


def test_the_shards_hold_the_same_images(filled):
    sizes = []
    for shards in (MIXED, BY_CLASS):
        job = loading_job(TINY, str(filled.folder / shards), 0)
        images = IndexedSource().open(job, World(), Stopwatch())
        assert images.index is not None
        sizes.append(sorted(images.index.size.tolist()))
    assert sizes[0] == sizes[1] and sum(sizes[0]) == filled.image_bytes


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("curl") is None, reason="WebDataset reads URLs by curl")
def test_each_reader_has_its_turn_at_each_delay(filled):
    report = TINY.report()
    installed = [name for name, reader in readers(TINY, filled).items() if reader is not None]
    assert [(row["delay"], row["reader"]) for row in report.figures] == [
        (delay, name) for delay in TINY.delay for name in installed
    ]
    assert all(row["images_per_second"] > 0 for row in report.figures)
    assert all(row["requests"] > 0 for row in report.figures if row["reader"] == ONE_BY_ONE)
    text = "\n".join([*report.notes, *(" ".join(cells) for cells in report.tables[0].rows)])
    assert (STREAMING in installed) != ("not installed" in text)


@pytest.mark.nightly
def test_two_hosts_with_caches_for_everything_read_nothing_in_their_last_passes(filled, tmp_path):
    settings = TINY.model_dump(include=set(StoreOptions.model_fields))
    with running_store(filled.folder) as store:
        reads = HostReads(
            **settings, url=store.url, cache_folder=tmp_path, cache_bytes=filled.shard_bytes
        )
        spent = bytes_of_passes(reads, 2)
    # a shard for each host at most, and a few images before their shards arrived
    assert len(spent) == PASSES and sum(spent) <= 2.5 * filled.shard_bytes
    assert spent[0] > spent[1] and {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
