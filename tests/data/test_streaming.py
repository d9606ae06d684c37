from collections import Counter

import pytest
from raising import raises
from servers import web_server
from streamed import SAMPLING, SPOILT, STEPS, png, seen, streamed, write_by_webdataset

from distap.config.reading import load_recipe
from distap.data.sampling import RandomSampling
from distap.data.shards.indexing import index_shards
from distap.data.shards.tar import DamagedShardError
from distap.errors import DistapError
from distap.world import World


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """48 images in eight shards, four of which are damaged."""
    return write_by_webdataset(tmp_path_factory.mktemp("spoilt") / "shards", spoil=SPOILT.items())


@pytest.fixture(scope="module")
def expected(spoilt):
    return seen(streamed(spoilt), range(STEPS), SAMPLING.size)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 2), (4, 1)])
def test_no_image_is_twice_in_a_batch_and_each_is_drawn_about_as_often(spoilt, ranks, workers):
    steps = 20
    batches = [[] for _ in range(20)]
    for rank in range(ranks):
        world = World(rank, ranks)
        own_values = seen(
            streamed(spoilt, world, workers=workers), range(steps), len(world.slots(SAMPLING.size))
        )
        for batch, rows in zip(batches, own_values, strict=True):
            batch += [name for name, _, _ in rows]
    assert all(len(set(batch)) == SAMPLING.size for batch in batches)
    drawn = Counter(name for batch in batches for name in batch)
    assert len(drawn) == 48 - len(SPOILT)
    assert max(drawn.values()) <= 3 * min(drawn.values())  # a stream of few images has them oftener


def test_what_is_damaged_is_left_out_and_named_once_and_labels_are_the_numbers_in_the_shards(
    spoilt,
):
    failures = []
    batches = seen(streamed(spoilt, sampling=RandomSampling(batch_size=11)), range(4), 11, failures)
    names = [name for batch in batches for name, _, _ in batch]
    assert len(set(names)) == 44  # all that are sound, in one pass
    assert sorted(failures) == [
        ("000.tar:01", "truncated"),
        ("001.tar:02", "decode_error"),
        ("002.tar:05", "missing_field"),
        ("006.tar:00", "missing_field"),
    ]
    for batch in batches:
        for name, label, _ in batch:
            assert label == (int(name[:3]) + int(name[-2:])) % 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_goes_on_begins_a_new_pass_which_is_the_same_each_time(spoilt, workers):
    whole = seen(streamed(spoilt, workers=workers), range(6), SAMPLING.size)
    first, second = (
        seen(streamed(spoilt, workers=workers), range(4, 6), SAMPLING.size) for _ in range(2)
    )
    assert first == second
    assert len({name for batch in first for name, _, _ in batch}) == 2 * SAMPLING.size
    assert all(later != before for later in first for before in whole)


def test_shards_over_http_give_what_the_files_give_through_faults_that_pass(spoilt, expected):
    with web_server(spoilt) as server:
        server.faults = ["503", "cut", "429"]
        assert (
            seen(streamed(f"{server.url}/{{000..007}}.tar"), range(2), SAMPLING.size)
            == expected[:2]
        )
        with raises("data.not_listable"):
            streamed(server.url)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [512, 5000, 4096])
def test_a_tar_that_was_cut_is_an_error_that_names_it_and_never_a_silent_skip(
    tmp_path, size, workers
):
    folder = write_by_webdataset(tmp_path / "shards", shards=4)
    path = folder / "002.tar"
    path.write_bytes(path.read_bytes()[:size])
    with raises("data.damaged_shard", folder, kind=DamagedShardError):
        seen(streamed(folder, workers=workers), range(4), SAMPLING.size)


def test_settings_that_do_not_fit_are_refused(spoilt, tmp_path):
    with raises("data.too_few_shards", "8", "9", "--images-per-shard"):
        streamed(spoilt, World(0, 9))
    settings = settings_of("shards", reading="streamed") | {
        "sampling": {"name": "classes", "batch_size": 8}
    }
    with raises("recipe.value", "sampling.name"):
        load_recipe(settings, where="test")
    nothing = {
        (shard, number): {"png": png(number)[:-600]} for shard in range(2) for number in range(5)
    }
    folder = write_by_webdataset(tmp_path / "short", shards=2, spoil=nothing.items())
    with raises("data.too_few_images", "12", "2"):
        seen(streamed(folder), range(1), 16)


def test_folders_that_number_their_classes_apart_are_refused_as_by_the_index(tmp_path):
    for name in ("birds", "cars"):
        write_by_webdataset(tmp_path / name, shards=2)
        (tmp_path / name / "classes.txt").write_text(
            "".join(f"{name} {number}\n" for number in range(5))
        )
    output = rf"{tmp_path}/birds/classes\.txt numbers the classes of its folder alone"
    for pattern in ("*/*.tar", "{birds,cars}/{000..001}.tar"):
        with pytest.raises(DistapError, match=output):
            streamed(f"{tmp_path}/{pattern}")
        with pytest.raises(DistapError, match=output):
            index_shards(f"{tmp_path}/{pattern}")
    (tmp_path / "classes.txt").write_text("".join(f"class {number}\n" for number in range(5)))
    assert streamed(f"{tmp_path}/*/*.tar").size == SAMPLING.size


def test_shards_of_others_in_several_folders_are_read_with_a_warning(tmp_path, caplog):
    for name in ("birds", "cars"):
        write_by_webdataset(tmp_path / name, shards=2)
    streamed(f"{tmp_path}/birds/*.tar")
    assert not caplog.messages
    streamed(f"{tmp_path}/*/*.tar")
    assert "in 2 folders, such as birds and cars" in caplog.messages[-1]
    index_shards(f"{tmp_path}/*/*.tar")
    assert len(caplog.messages) == 2


def test_the_list_of_shards_tells_data_sets_apart(spoilt):
    assert streamed(spoilt).fingerprint == streamed(f"{spoilt}/*.tar").fingerprint
    assert streamed(spoilt).fingerprint != streamed(f"{spoilt}/{{000..006}}.tar").fingerprint


def settings_of(source, **data):
    return {
        "run": "r",
        "steps": 1,
        "data": {"train": source, **data},
        "sampling": {"name": "random", "batch_size": 4},
    }
