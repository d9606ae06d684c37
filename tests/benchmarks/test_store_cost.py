"""What an epoch costs a store is what the loader then asks for."""

from collections import Counter
from contextlib import closing

import pytest
from images import AUGMENTATION, pack_eight_shards
from raising import raises
from servers import web_server
from small_trainings import recipe

from benchmarks.plan.store_cost import Prices, store_costs, store_table
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.world import World

BATCH = 12
STEPS = 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack_eight_shards(tmp_path_factory.mktemp("packed"))


def settings_of(packed, tmp_path, **changes):
    sampling = {"name": "p_by_k", "classes": 4, "images": 3, "window": 2}
    return recipe(tmp_path / "run", [packed], sampling=sampling, **changes)


def read(url, settings, ranks):
    """Traffic of an epoch of all ranks, each on a host of its own without a cache."""
    traffic = Counter()
    for rank in range(ranks):
        job = LoadingJob(
            parse_source(url),
            settings.sampling,
            settings.seed,
            ((0, 16, AUGMENTATION.transform(16)),),
            chunk=settings.replay.size,
        )
        images = IndexedSource().open(job, World(rank, ranks), Stopwatch())
        with closing(images.shares(range(STEPS))) as shares:
            for share in shares:
                share.images(slice(0, len(images.places)))
                traffic += share.traffic
    return traffic


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_requests_and_bytes_are_those_of_the_loader(packed, tmp_path, ranks):
    settings = settings_of(packed, tmp_path)
    (row,) = store_costs(settings, [ranks], 1, Prices(gigabyte=2.0, thousand_requests=3.0))
    with web_server(packed) as server:
        traffic = read(server.url, settings, ranks)
    assert row["steps"] == STEPS
    assert row["requests"] == traffic["requests"]
    assert row["bytes"] == traffic["read_bytes"]
    assert row["cost"] == pytest.approx(
        2.0 * traffic["read_bytes"] / 1e9 + 3.0 * traffic["requests"] / 1000
    )


def test_a_cache_fetches_each_shard_once_and_later_epochs_nothing(packed, tmp_path):
    cache = {"folder": str(tmp_path / "cache"), "bytes": 10**9}
    settings = settings_of(packed, tmp_path, data__cache=cache)
    (row,) = store_costs(settings, [1], 8, Prices())
    index = load_index(packed)
    assert row["requests"] == len(index.shard_name)
    assert row["bytes"] == index.shard_size.sum() and row["times"] == 1
    assert row["later_times"] == 0
    small = cache | {"bytes": 5 * int(index.shard_size.max())}
    (row,) = store_costs(settings_of(packed, tmp_path, data__cache=small), [1], 8, Prices())
    assert row["times"] == 1 and 0 < row["later_times"] <= 1


def test_a_cache_fetches_large_classes_again_and_again(packed, tmp_path):
    # A pass takes two of the three images of a class, so an epoch is one pass and a half.
    limit = 5 * int(load_index(packed).shard_size.max())
    cache = {"folder": str(tmp_path / "cache"), "bytes": limit}
    sampling = {"name": "p_by_k", "classes": 4, "images": 2, "window": 2}
    settings = recipe(tmp_path / "run", [packed], sampling=sampling, data__cache=cache)
    (row,) = store_costs(settings, [1], 8, Prices())
    assert 1.1 < row["times"] < 1.6


def test_the_table_has_a_line_for_each_number_of_gpus(packed, tmp_path):
    table = store_table(store_costs(settings_of(packed, tmp_path), [1, 2], 1, Prices()))
    assert table.row_count == 2


def test_images_without_shards_are_refused(packed, tmp_path):
    settings = settings_of(packed, tmp_path, data__train=f"imagefolder:{packed.parent}/images")
    with raises("data.no_shards", "imagefolder"):
        store_costs(settings, [1], 8, Prices())
