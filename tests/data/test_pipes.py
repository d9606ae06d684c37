import os
import select
import subprocess
import sys
import time

import pytest
from streamed import SAMPLING, STEPS, seen, streamed, write_by_webdataset

from distap.config.reading import recipe_from
from distap.data.loading.pipes import FailedCommandError, piped
from distap.data.loading.streams import StreamedShards
from distap.data.sampling.streams import StreamsSampling
from distap.data.shards.load_index import load_index
from distap.data.shards.tar import DamagedShardError
from distap.errors import FAILED, DistapError
from distap.storage.locations import parse_source
from distap.storage.traffic import Meter


@pytest.fixture(scope="module")
def shards_of_others(tmp_path_factory):
    return write_by_webdataset(tmp_path_factory.mktemp("sound") / "shards")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipe_gives_what_the_file_gives(shards_of_others, workers):
    images = streamed(f"pipe:cat {shards_of_others}/{{000..007}}.tar", workers=workers)
    read = seen(images, range(STEPS), SAMPLING.size)
    stripped = [
        [(name.removeprefix(f"pipe:cat {shards_of_others}/"), *rest) for name, *rest in batch] for batch in read
    ]
    assert stripped == seen(streamed(shards_of_others), range(STEPS), SAMPLING.size)


def test_what_is_read_is_counted(shards_of_others):
    size = (shards_of_others / "000.tar").stat().st_size
    for source in (f"{shards_of_others}/000.tar", f"pipe:cat {shards_of_others}/000.tar"):
        shards = StreamedShards(parse_source(source, allow_pipes=True))
        assert len(list(shards.samples(0, 1, 0))) == 6
        assert shards.meter.take().read_bytes == size


def test_every_cut_of_a_pipe_is_an_error(tmp_path):
    folder = write_by_webdataset(tmp_path / "shards", shards=1, images=2)
    whole = (folder / "000.tar").read_bytes()
    end = len(whole.rstrip(b"\0")) + 512
    shards = StreamedShards(parse_source(f"pipe:cat {folder}/000.tar", allow_pipes=True))
    for size in range(0, end + 512 - end % 512, 512):
        (folder / "000.tar").write_bytes(whole[:size])
        with pytest.raises(DamagedShardError, match=r"000\.tar: damaged tar: "):
            list(shards.samples(0, 1, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_command_that_fails_is_an_error_with_what_it_said(shards_of_others, workers):
    command = f"cat {shards_of_others}/000.tar; echo the disk is on fire >&2; exit 3"
    source = f"pipe:{command}"
    with pytest.raises(FailedCommandError, match="failed with status 3, and said: the disk is on fire") as error:
        seen(streamed(source, workers=workers, sampling=StreamsSampling(batch_size=16, streams=1)), range(1), 16)
    assert command in str(error.value)
    assert error.value.status == FAILED  # what it reads from may come back
    cut_short = f"pipe:head -c 5000 {shards_of_others}/000.tar; exit 4"
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
from distap.data.loading.pipes import piped
from distap.storage.traffic import Meter
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
            "batch_size is 100, which 8 streams cannot share equally; expected 96 or 104",
        ),
        ({"sampling": {"name": "streams", "batch_size": 4, "streams": 0}}, "streams and shuffle of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_those_that_would(changes, message):
    with pytest.raises(DistapError, match=message):
        recipe_from(settings_of("shards", reading="streamed") | changes, "test")
