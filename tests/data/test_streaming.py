import numpy as np
import pytest
import torch
from images import write_images
from servers import web_server
from streamed import ALONE, CHUNK, SAMPLING, SEED, SPOILT, STEPS, TRANSFORM, png, seen, streamed, write_by_webdataset

from distap.data.loading.indexed import SlotImages
from distap.data.loading.pixels import PixelSettings
from distap.data.loading.reading import Reader
from distap.data.loading.training import IndexedImages, LoaderSettings
from distap.data.plan import Classes, Plan
from distap.data.sampling import StreamsSampling
from distap.data.shards.index import load_index
from distap.data.shards.packing import pack
from distap.data.shards.tar import DamagedShardError
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
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


def indexed(folder, world=ALONE, sampling=SAMPLING, seed=SEED):
    index = load_index(folder)
    plan = Plan(Classes(index.label, None, index.shard_counts), sampling, seed)
    images = SlotImages(Reader(folder, index), plan, TRANSFORM, 16)
    return IndexedImages(images, world.slots(plan.size), LoaderSettings(CHUNK, 0, 2), Stopwatch())


def global_batches(source, ranks, workers, steps=range(STEPS), sampling=SAMPLING, states=None):
    """The global batches of all ranks, simulated one after the other; they go on from the states of each."""
    batches = [[None] * sampling.size for _ in steps]
    for rank in range(ranks):
        world = World(rank, ranks)
        images = streamed(source, world, workers, sampling)
        if states is not None:
            images.load_state_dict(states)
        for batch, mine in zip(batches, seen(images, steps, len(world.slots(sampling.size))), strict=True):
            batch[rank::ranks] = mine
    return batches


SHAPES = [SAMPLING, StreamsSampling(batch_size=10, streams=2, shuffle=40), StreamsSampling(batch_size=8, streams=8)]


@pytest.mark.parametrize("sampling", [*SHAPES, StreamsSampling(batch_size=20, streams=1, shuffle=1)])
def test_streamed_reading_gives_the_batches_of_the_plan(sound, sampling):
    if sampling.streams == 8:
        with pytest.raises(DistapError, match="stream 7 of 8 has only 1 usable images"):
            indexed(sound, sampling=StreamsSampling(batch_size=16, streams=8))
    planned = seen(indexed(sound, sampling=sampling), range(STEPS), sampling.size)
    read = seen(streamed(sound, sampling=sampling), range(STEPS), sampling.size)
    assert read == planned  # packed shards number classes without gaps, as the index does


def plan_of(sizes, sampling, seed=0):
    return Plan(Classes(np.zeros(sum(sizes), dtype=np.int64), None, np.array(sizes)), sampling, seed)


@pytest.mark.parametrize(
    ("sizes", "sampling"),
    [
        ([5, 7, 3, 4, 6, 9], StreamsSampling(batch_size=10, streams=2, shuffle=4)),
        ([3, 3], StreamsSampling(batch_size=4, streams=2, shuffle=7)),
        ([20], StreamsSampling(batch_size=20, streams=1, shuffle=6)),
        ([4, 9, 2, 0, 8, 8], StreamsSampling(batch_size=9, streams=3, shuffle=1)),
    ],
)
def test_no_image_is_twice_in_a_batch_and_each_is_drawn_about_as_often(sizes, sampling):
    plan = plan_of(sizes, sampling)
    steps = 40
    batches = [plan.batch(step) for step in range(steps)]
    assert all(len(set(batch.tolist())) == sampling.size for batch in batches)
    drawn = np.bincount(np.concatenate(batches), minlength=sum(sizes))
    shards = np.repeat(np.arange(len(sizes)), sizes)
    for stream in range(sampling.streams):
        own = drawn[shards % sampling.streams == stream]
        # A whole batch of a stream leaves it no choice; otherwise passes differ by one, and by what was passed over.
        assert own.max() - own.min() <= 2 + steps // 8
    again = plan_of(sizes, sampling)
    assert all(np.array_equal(again.batch(step), batches[step]) for step in (29, 3, 17, 0))


def test_a_step_far_ahead_is_found_without_the_way_there():
    sampling = StreamsSampling(batch_size=64, streams=4, shuffle=16)
    sizes = [50] * 40
    walked, jumped = plan_of(sizes, sampling), plan_of(sizes, sampling)
    for step in range(301):
        last = walked.batch(step)
    assert np.array_equal(jumped.batch(300), last)


def test_the_plan_of_streams_never_changes():
    plan = plan_of([4, 5, 6, 7], StreamsSampling(batch_size=8, streams=2, shuffle=3))
    assert plan.batch(5).tolist() == [0, 4, 2, 8, 3, 6, 1, 7]


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
    state["cursors"][:, 4] = 5
    images = streamed(tmp_path / "shrunk")
    images.load_state_dict(state)
    with pytest.raises(DistapError, match=r"it has 1 samples, but the run was behind 5 of them"):
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
