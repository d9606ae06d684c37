import hashlib
import io
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from conftest import write_images
from faults import record, recorded_batches
from PIL import Image
from ranks import on_ranks
from servers import web_server
from test_trainer import losses, parameters, recipe

from distap.config import load_recipe, recipe_from
from distap.data.index import load_index
from distap.data.loading import SlotImages
from distap.data.locations import parse_source
from distap.data.packing import pack
from distap.data.pipes import FailedCommandError, piped
from distap.data.pixels import PixelSettings
from distap.data.plan import Classes, Plan
from distap.data.reading import Reader
from distap.data.sampling import StreamsSampling
from distap.data.storage import Meter, RemoteSettings
from distap.data.streaming import StreamedImages
from distap.data.streams import SequentialShards
from distap.data.tar import DamagedShardError
from distap.data.training import IndexedImages, LoaderSettings
from distap.data.transforms import Augmentation, training_transform
from distap.distributed import World
from distap.errors import DistapError
from distap.exits import FAILED
from distap.step import ThreeStageStep
from distap.stopwatch import Stopwatch
from distap.trainer import Trainer

SAMPLING = StreamsSampling(batch_size=16, streams=4, shuffle=5)
TRANSFORM = training_transform(16, Augmentation(crop=0.3, flip=0.5, colour=0.4, grey=0.3))
SEED, STEPS, CHUNK = 3, 9, 3  # about three passes


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """50 images of ten classes in eight shards, the last of one image."""
    folder = tmp_path_factory.mktemp("sound")
    write_images(folder / "images", {f"class-{number}": 5 for number in range(10)})
    pack(folder / "images", folder / "shards", images_per_shard=7, shuffle=1)
    return folder / "shards"


def png(shade):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(shade).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_by_webdataset(folder, shards=8, images=6, spoil=()):
    """Shards that others would write, without an index; `spoil` changes members of some samples."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for number in range(images):
                sample = {"__key__": f"{number:02d}", "png": png(100 * shard + number), "cls": (shard + number) % 5}
                sample |= dict(spoil).get((shard, number), {})
                writer.write({key: value for key, value in sample.items() if value is not None})
    return folder


# What decoding finds, what the header tells, and what is not there.
SPOILT = {(0, 1): {"png": png(7)[:-600]}, (1, 2): {"png": b"no image"}, (2, 5): {"cls": None}, (6, 0): {"cls": "cat"}}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    return write_by_webdataset(tmp_path_factory.mktemp("spoilt") / "shards", spoil=SPOILT.items())


ALONE = World()


def streamed(source, world=ALONE, workers=0, sampling=SAMPLING, seed=SEED, remote=None, **settings):
    shards = SequentialShards(parse_source(source, allow_pipes=True), remote)
    loader = LoaderSettings(CHUNK, 2, workers, 2, **settings)
    return StreamedImages(shards, sampling, seed, world, TRANSFORM, 16, loader, Stopwatch())


def indexed(folder, world=ALONE, sampling=SAMPLING, seed=SEED):
    index = load_index(folder)
    plan = Plan(Classes(index.label, None, index.shard_counts), sampling, seed)
    images = SlotImages(Reader(folder, index), plan, TRANSFORM, 16)
    return IndexedImages(images, world.slots(plan.size), LoaderSettings(CHUNK, 2, 0, 2), Stopwatch())


def seen(images, steps, count, failures=None):
    """What this rank's `count` rows of each step are: shard and key, class, and the pixels by hash."""
    batches = []
    for share in images.shares(steps):
        pixels = [
            p for start in range(0, count, CHUNK) for p in share.images(slice(start, min(start + CHUNK, count)))
        ]
        digests = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in pixels]
        batches.append(list(zip(share.names, share.labels.tolist(), digests, strict=True)))
        if failures is not None:
            failures += share.failures
    return batches


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipe_gives_what_the_file_gives(spoilt, expected, workers):
    images = streamed(f"pipe:cat {spoilt}/{{000..007}}.tar", workers=workers)
    read = seen(images, range(STEPS), SAMPLING.size)
    stripped = [[(name.removeprefix(f"pipe:cat {spoilt}/"), *rest) for name, *rest in batch] for batch in read]
    assert stripped == expected


def test_what_is_read_is_counted(spoilt):
    size = (spoilt / "000.tar").stat().st_size
    for source in (f"{spoilt}/000.tar", f"pipe:cat {spoilt}/000.tar"):
        shards = SequentialShards(parse_source(source, allow_pipes=True))
        assert len(list(shards.groups(0))) == 6
        assert shards.take_traffic().read_bytes == size


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


def test_every_cut_of_a_pipe_is_an_error(tmp_path):
    folder = write_by_webdataset(tmp_path / "shards", shards=1, images=2)
    whole = (folder / "000.tar").read_bytes()
    end = len(whole.rstrip(b"\0")) + 512
    shards = SequentialShards(parse_source(f"pipe:cat {folder}/000.tar", allow_pipes=True))
    for size in range(0, end + 512 - end % 512, 512):
        (folder / "000.tar").write_bytes(whole[:size])
        with pytest.raises(DamagedShardError, match=r"000\.tar: damaged tar: "):
            list(shards.groups(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_command_that_fails_is_an_error_with_what_it_said(spoilt, workers):
    command = f"cat {spoilt}/000.tar; echo the disk is on fire >&2; exit 3"
    source = f"pipe:{command}"
    with pytest.raises(FailedCommandError, match="failed with status 3, and said: the disk is on fire") as error:
        seen(streamed(source, workers=workers, sampling=StreamsSampling(batch_size=16, streams=1)), range(1), 16)
    assert command in str(error.value)
    assert error.value.status == FAILED  # what it reads from may come back
    cut_short = f"pipe:head -c 5000 {spoilt}/000.tar; exit 4"
    with pytest.raises(FailedCommandError, match="status 4, and said: nothing"):
        seen(streamed(cut_short, sampling=StreamsSampling(batch_size=16, streams=1)), range(1), 16)


STUCK = "sleep 1000 & echo $! > {file}; echo; sleep 1000"


def ends(process, seconds=30.0):
    """Whether a process, given by its descriptor, ends within so long."""
    return bool(select.select([process], [], [], seconds)[0])


def test_a_command_ends_with_its_reader(tmp_path):
    with piped(STUCK.format(file=tmp_path / "pid"), Meter()) as pipe:
        assert pipe.read(1) == b"\n"
        background = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert not ends(background, 0)
    assert ends(background)
    os.close(background)


KILLED = """
import os, signal, sys
from distap.data.pipes import piped
from distap.data.storage import Meter
with piped(sys.argv[1], Meter()) as pipe:
    pipe.read(1)
    sys.stdin.read()
"""


def test_a_command_ends_with_its_reader_even_if_that_is_killed(tmp_path):
    command = [sys.executable, "-c", KILLED, STUCK.format(file=tmp_path / "pid") + "; echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as reader:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert reader.poll() is None
            time.sleep(0.02)
        background = os.pidfd_open(int((tmp_path / "pid").read_text()))
        reader.kill()
    assert ends(background)
    os.close(background)


def settings_of(source, **data):
    return {
        "run": "r",
        "steps": 1,
        "data": {"train": source, **data},
        "sampling": {"name": "streams", "batch_size": 4, "streams": 1},
    }


@pytest.mark.parametrize("allowed", [{}, {"reading": "streamed"}, {"allow_pipes": True}])
def test_a_pipe_is_refused_unless_the_configuration_allows_it(tmp_path, allowed):
    with pytest.raises(DistapError, match=r"needs data\.allow_pipes: true and data\.reading: streamed"):
        recipe_from(settings_of(f"pipe:touch {tmp_path}/ran", **allowed), "test")
    with pytest.raises(DistapError, match="pipe: runs a shell command"):
        load_index(f"pipe:touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_a_pipe_to_validate_on_is_refused_always():
    settings = settings_of("pipe:cat a.tar", allow_pipes=True, reading="streamed", validation="pipe:cat b.tar")
    with pytest.raises(DistapError, match=r"data\.validation: .*runs a shell command"):
        recipe_from(settings, "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"name": "random"}}, "but sampling.name is random; set it to streams"),
        (
            {"sampling": {"name": "streams", "batch_size": 100, "streams": 8}},
            "batch_size is 100, of which each of 8 streams cannot give the same share; expected 96 or 104",
        ),
        ({"sampling": {"name": "streams", "batch_size": 4, "streams": 0}}, "streams and shuffle of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_those_that_would(changes, message):
    with pytest.raises(DistapError, match=message):
        recipe_from(settings_of("shards", reading="streamed") | changes, "test")


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


def test_that_validation_classes_are_unseen_is_checked_where_there_is_an_index(tmp_path, training_shards, caplog):
    changes = {
        "data__reading": "streamed",
        "data__validation": str(training_shards[1]),
        "sampling": {"name": "streams", "batch_size": 8, "streams": 2},
    }
    with pytest.raises(DistapError, match="class"):
        both = (training_shards[1], training_shards[1])
        Trainer(recipe(tmp_path / "run", both, **changes), World())
    without = tmp_path / "shards"
    shutil.copytree(training_shards[1], without)
    (without / "index.npz").unlink()
    Trainer(recipe(tmp_path / "run", (without,), **changes), World())
    assert f"{without}: whether {training_shards[1]} shares classes with it is not checked" in caplog.text


def train(world, folder, name):
    """Train by the recipe NAME.yaml, with a record of the batches."""
    unrecorded = ThreeStageStep.__call__
    record(folder / f"{name}-records")
    Trainer(load_recipe(folder / f"{name}.yaml"), world).train()
    ThreeStageStep.__call__ = unrecorded


def go_on(folder, name):
    """Begin a run with what the whole one had after two steps."""
    checkpoint = Path("checkpoints") / "step-00000002"
    shutil.copytree(folder / "whole" / checkpoint, folder / name / checkpoint)


def train_twice(world, folder):
    train(world, folder, "whole")
    if world.rank == 0:
        go_on(folder, "two")
    world.barrier()
    train(world, folder, "two")
    return world.gather_texts([f"rank {world.rank}", "é" * world.rank], 2 * world.size)


@pytest.mark.slow
def test_shards_of_others_train_without_an_index_and_a_run_goes_on_with_the_same_batches(tmp_path):
    shards = write_by_webdataset(tmp_path / "shards", spoil=SPOILT.items())
    for name in ("whole", "two", "one"):
        (tmp_path / f"{name}-records").mkdir()
        settings = recipe(
            tmp_path / name,
            (shards,),
            steps=4,
            data__reading="streamed",
            data__workers=1,
            sampling={"name": "streams", "batch_size": 16, "streams": 4, "shuffle": 5},
            checkpoint={"every": 2, "keep": 9},
        )
        (tmp_path / f"{name}.yaml").write_text(settings.model_dump_json())
    assert on_ranks(2, train_twice, tmp_path) == [["rank 0", "rank 1", "", "é"]] * 2
    go_on(tmp_path, "one")
    train(World(), tmp_path, "one")

    whole, two, one = (recorded_batches(tmp_path / f"{name}-records") for name in ("whole", "two", "one"))
    assert [len(whole[step]) for step in range(4)] == [1] * 4
    assert two == one == {step: whole[step] for step in (2, 3)}
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")[2:]
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "whole")[2:], abs=1e-4)
    ours, theirs = parameters(tmp_path / "two"), parameters(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_does_not_go_on_with_the_other_way_of_reading(tmp_path, training_shards):
    sampling = {"name": "streams", "batch_size": 8, "streams": 2, "shuffle": 4}
    Trainer(recipe(tmp_path, training_shards, steps=1, sampling=sampling), World()).train()
    changed = recipe(tmp_path, training_shards, steps=2, sampling=sampling, data__reading="streamed")
    with pytest.raises(DistapError, match=r"another data\.reading: None, now streamed"):
        Trainer(changed, World()).train()
