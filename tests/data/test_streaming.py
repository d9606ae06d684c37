import json
from collections import Counter

import pytest
import torch
from images import write_images
from servers import web_server
from streamed import SAMPLING, SPOILT, STEPS, png, seen, streamed, write_by_webdataset

from distap.data.loading.streamed import StreamedSource
from distap.data.sampling.random import RandomSampling
from distap.data.sampling.streams import StreamsSampling
from distap.data.settings import PixelSettings
from distap.data.shards.packing import pack
from distap.data.shards.tar import DamagedShardError
from distap.errors import DistapError
from distap.storage.remotes import RemoteSettings
from distap.world import World


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """50 images of ten classes in eight shards, the last of one image."""
    folder = tmp_path_factory.mktemp("sound")
    write_images(folder / "images", {f"class-{number}": 5 for number in range(10)})
    pack(folder / "images", folder / "shards", images_per_shard=7, shuffle=1)
    return folder / "shards"


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    return write_by_webdataset(tmp_path_factory.mktemp("spoilt") / "shards", spoil=SPOILT.items())


def global_batches(source, ranks, workers, steps=range(STEPS), sampling=SAMPLING, states=None):
    """The global batches of all ranks, simulated one after the other; they go on from the states of each."""
    batches = [[None] * sampling.size for _ in steps]
    for rank in range(ranks):
        world = World(rank, ranks)
        images = streamed(source, world, sampling, workers=workers)
        if states is not None:
            images.load_state_dict(states)
        for batch, mine in zip(batches, seen(images, steps, len(world.slots(sampling.size))), strict=True):
            batch[rank::ranks] = mine
    return batches


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        StreamsSampling(batch_size=10, streams=2, shuffle=40),
        StreamsSampling(batch_size=8, streams=8),
        StreamsSampling(batch_size=20, streams=1, shuffle=1),
    ],
    ids=str,
)
def test_no_image_is_twice_in_a_batch_and_each_is_drawn_about_as_often(sound, sampling):
    steps = 40
    batches = seen(streamed(sound, sampling=sampling), range(steps), sampling.size)
    assert all(len({name for name, _, _ in batch}) == sampling.size for batch in batches)
    for stream in range(sampling.streams):
        drawn = Counter(name for batch in batches for name, _, _ in batch[stream :: sampling.streams])
        own = {int(name.partition(".")[0]) % sampling.streams for name in drawn}
        assert own == {stream}
        # Passes differ by one, and by the images that were left out at their seams.
        assert max(drawn.values()) - min(drawn.values()) <= 2 + steps // 8


def order(folder, shuffle):
    sampling = StreamsSampling(batch_size=20, streams=1, shuffle=shuffle)
    (batch,) = seen(streamed(folder, sampling=sampling), range(1), 20)
    return [name for name, _, _ in batch]


def test_the_order_of_a_stream_never_changes(spoilt):
    """A training that goes on with a newer distap, numpy, webdataset or Python must see the same batches."""
    assert order(spoilt, 1)[3:8] == ["007.tar:03", "007.tar:04", "007.tar:05", "005.tar:00", "005.tar:01"]
    assert order(spoilt, 4)[3:8] == ["007.tar:02", "007.tar:00", "007.tar:05", "005.tar:03", "005.tar:00"]


@pytest.fixture(scope="module")
def expected(spoilt):
    return global_batches(spoilt, 1, 0)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (2, 2), (4, 0), (4, 2)])
def test_batches_and_pixels_are_the_same_on_any_number_of_ranks(spoilt, expected, ranks, workers):
    assert global_batches(spoilt, ranks, workers) == expected


def test_what_is_damaged_is_left_out_and_named(spoilt, expected):
    failures = []
    seen(streamed(spoilt), range(STEPS), SAMPLING.size, failures)
    assert set(failures) == {
        ("000.tar:01", "truncated"),
        ("001.tar:02", "decode_error"),
        ("002.tar:05", "missing_field"),
        ("006.tar:00", "missing_field"),
    }
    names = {name for batch in expected for name, _, _ in batch}
    assert len(names) == 8 * 6 - 4
    for batch in expected:
        assert len({name for name, _, _ in batch}) == SAMPLING.size


def test_what_is_damaged_is_told_in_the_step_that_does_without_it_and_not_again_by_a_run_that_goes_on(spoilt):
    images = streamed(spoilt, sampling=StreamsSampling(batch_size=4, streams=2, shuffle=20))
    by_step, states = [], []
    for share in images.shares(range(20)):
        share.images(slice(0, 4))
        by_step.append(share.failures)
        states.append(images.state_dict())
    assert max(map(len, by_step)) <= 2  # though the first step reads 40 images
    for step in (1, 7, 13):
        later = streamed(spoilt, sampling=StreamsSampling(batch_size=4, streams=2, shuffle=20))
        later.load_state_dict(states[step - 1])
        for share, failures in zip(later.shares(range(step, 20)), by_step[step:], strict=True):
            share.images(slice(0, 4))
            assert share.failures == failures


def test_labels_are_the_numbers_in_the_shards(spoilt, expected):
    for batch in expected:
        for name, label, _ in batch:
            assert label == (int(name[:3]) + int(name[-2:])) % 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_from_its_cursors_at_any_step_on_another_number_of_ranks(spoilt, expected, workers):
    images = streamed(spoilt, workers=workers)
    states = [images.state_dict()["cursors"].clone()]
    for share in images.shares(range(STEPS - 1)):
        share.images(slice(0, SAMPLING.size))
        states.append(images.state_dict()["cursors"].clone())  # though workers have read ahead
    for step, ranks in ((0, 4), (3, 2), (6, 1), (STEPS - 1, 4)):
        steps = range(step, STEPS)
        assert global_batches(spoilt, ranks, 0, steps, states={"cursors": states[step]}) == expected[step:]


def test_cursors_of_another_kind_are_refused(spoilt):
    for state in ({}, {"cursors": torch.zeros(3, 5, dtype=torch.int64)}):
        with pytest.raises(DistapError, match="does not say where the streams of shards go on"):
            streamed(spoilt).load_state_dict(state)


def test_shards_that_shrank_since_are_noticed(spoilt, tmp_path):
    images = streamed(spoilt)
    for share in images.shares(range(1)):
        share.images(slice(0, SAMPLING.size))
    state = images.state_dict()
    write_by_webdataset(tmp_path / "shrunk", images=1)
    state["cursors"] = torch.tensor([[0, 0, 5]] * 4)
    images = streamed(tmp_path / "shrunk")
    images.load_state_dict(state)
    with pytest.raises(DistapError, match=r"it has 1 samples, but the run had already used 5 of them"):
        seen(images, range(1), SAMPLING.size)


def test_pixels_wait_in_memory_or_in_the_spool_but_are_not_read_again(sound, tmp_path):
    in_memory = seen(streamed(sound), range(2), 16)
    assert seen(streamed(sound, pixels=PixelSettings(hold="spool", spool_folder=tmp_path)), range(2), 16) == in_memory
    with pytest.raises(DistapError, match=r"data\.pixels\.hold is reread, but streamed reading"):
        streamed(sound, pixels=PixelSettings(hold="reread"))


def test_shards_over_http_give_what_the_files_give_through_faults_that_pass(spoilt, expected):
    with web_server(spoilt) as server:
        server.faults = ["503", "cut", "429"]
        remote = RemoteSettings(attempts=4, timeout_seconds=20, backoff_seconds=0)
        images = streamed(f"{server.url}/{{000..007}}.tar", workers=1, remote=remote)
        assert seen(images, range(2), SAMPLING.size) == expected[:2]
        with pytest.raises(DistapError, match="a web server cannot list its files"):
            streamed(server.url, remote=remote)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [512, 5000, 4096])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_tar_that_was_cut_is_an_error_that_names_it_and_never_a_silent_skip(tmp_path, kind, size, workers):
    folder = write_by_webdataset(tmp_path / "shards", shards=4)
    cut(folder / "002.tar", size)
    source = folder if kind == "file" else f"pipe:cat {folder}/{{000..003}}.tar"
    with pytest.raises(DamagedShardError, match=rf"{folder}/002\.tar: damaged tar: .*byte"):
        seen(streamed(source, workers=workers), range(4), SAMPLING.size)


def test_ranks_and_shards_that_do_not_fit_are_refused_with_numbers_that_would(sound):
    with pytest.raises(DistapError, match=r"3 ranks cannot own .* one of 1, 2, 4 ranks; .* set it to 3 or 6"):
        streamed(sound, World(0, 3))
    with pytest.raises(DistapError, match=r"the data set has only 8 shards, .* set it to 8 or less"):
        streamed(sound, sampling=StreamsSampling(batch_size=18, streams=9))


def test_a_stream_that_is_too_short_for_a_batch_is_an_error_and_not_an_endless_search(tmp_path):
    sampling = StreamsSampling(batch_size=16, streams=2, shuffle=3)
    folder = write_by_webdataset(tmp_path / "short", shards=4, images=2)
    with pytest.raises(DistapError, match=r"short: stream 0 of 2 has only 4 usable images, but gives 8 to a batch"):
        seen(streamed(folder, sampling=sampling), range(1), 16)
    nothing = {(shard, number): {"png": b"no image"} for shard in range(2) for number in range(6)}
    folder = write_by_webdataset(tmp_path / "none", shards=2, spoil=nothing.items())
    with pytest.raises(DistapError, match="stream 0 of 2 has only 0 usable images"):
        seen(streamed(folder, sampling=sampling), range(1), 16)
    nothing = {(0, number): {"png": png(number)[:-600]} for number in range(6)}
    folder = write_by_webdataset(tmp_path / "undecodable", shards=2, spoil=nothing.items())
    with pytest.raises(DistapError, match="stream 0 of 2 has only 0 usable images"):
        seen(streamed(folder, sampling=sampling), range(1), 16)


def test_the_list_of_shards_tells_data_sets_apart(spoilt, sound):
    assert streamed(spoilt).fingerprint == streamed(f"{spoilt}/*.tar").fingerprint
    assert streamed(spoilt).fingerprint != streamed(sound).fingerprint


def labels(folder, **settings):
    """Labels and failures of a batch of every image of a folder of one shard."""
    sampling, failures = StreamsSampling(batch_size=4, streams=1, shuffle=1), []
    (batch,) = seen(streamed(folder, sampling=sampling, reading=StreamedSource(**settings)), range(1), 4, failures)
    return {name[-2:]: label for name, label, _ in batch}, failures


def test_classes_are_read_from_text_json_and_a_map(tmp_path):
    annotated = {
        0: {"txt": "cat", "json": b'{"object": {"class": "cat"}, "id": 7}'},
        1: {"txt": "12\n", "json": b'{"object": {"class": "dog"}, "id": 12}'},
        2: {"txt": "cat", "json": b'{"object": {"class": "cat"}, "id": 7}'},
        3: {"txt": "dog", "json": b'{"object": {"class": "eel"}, "id": 0}'},
    }
    spoil = {(0, number): {**members, "cls": None} for number, members in annotated.items()}
    folder = write_by_webdataset(tmp_path / "annotated", shards=1, images=4, spoil=spoil.items())
    (tmp_path / "numbers.json").write_text(json.dumps({"cat": 3, "dog": "beast", "eel": 4}))

    by_text, _ = labels(folder, label="txt")
    assert by_text["01"] == 12
    assert by_text["00"] == by_text["02"] != by_text["03"]
    assert by_text["00"] == 843_079_001_574_132_759  # in every run
    assert labels(folder, label="json", label_key="id") == ({"00": 7, "01": 12, "02": 7, "03": 0}, [])
    mapped, _ = labels(folder, label="json", label_key="object.class", label_map=tmp_path / "numbers.json")
    assert (mapped["00"], mapped["02"], mapped["03"]) == (3, 3, 4)
    assert mapped["01"] > 10**9


def test_a_sample_without_its_class_is_left_out_and_counted(tmp_path):
    spoil = {
        (0, 1): {"json": b"{}"},
        (0, 2): {"json": b"{"},
        (0, 4): {"json": b'{"id": 1.5}'},
        (0, 5): {"json": None},
    }
    rest = {(0, number): {"json": {"id": number}} for number in (0, 3, 6, 7)}
    folder = write_by_webdataset(tmp_path / "json", shards=1, images=8, spoil=(spoil | rest).items())
    found, failures = labels(folder, label="json", label_key="id")
    assert found == {"00": 0, "03": 3, "06": 6, "07": 7}
    assert failures == [(f"000.tar:{key:02d}", "missing_field") for key in (1, 2, 4, 5)]
    (tmp_path / "map.json").write_text(json.dumps({f"{key:02d}": key % 2 for key in (0, 3, 6, 7)}))
    found, failures = labels(folder, label="__key__", label_map=tmp_path / "map.json")
    assert found == {"00": 0, "03": 1, "06": 0, "07": 1}
    assert len(failures) == 4
    for text in ("[]", "{"):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(DistapError, match=r"data\.reading\.label_map: .*map\.json: "):
            labels(folder, label="__key__", label_map=tmp_path / "map.json")


def test_streamed_reading_needs_sampling_by_streams(sound):
    with pytest.raises(DistapError, match=r"data\.reading is streamed, .* set sampling\.name to streams"):
        streamed(sound, sampling=RandomSampling(batch_size=8))
