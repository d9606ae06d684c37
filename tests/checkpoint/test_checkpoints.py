import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from evil import Evil
from raising import raises
from ranks import on_ranks
from safetensors.torch import load_file
from stores import (
    SHARD,
    checkpoints_of,
    found_checkpoint,
    newest_on_disk,
    rewrite_manifest,
    writer_to,
)

from distap.checkpoint.manifest import DamagedCheckpointError, write_tensors
from distap.errors import FAILED
from distap.world import World

TENSORS = {
    "network.a": torch.arange(6.0).view(2, 3),
    "network.half": torch.arange(6).bfloat16(),
    "network.b": torch.tensor(7),
    "memory.labels": torch.arange(4),
    "memory.none": torch.zeros(0, 5),
    "network.images": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
}
STATE = {"step": 3, "names": ["x"]}


def save(run, *steps, keep=99, scores=(), tensors=TENSORS, world=None):
    writer = writer_to(run, world, keep)
    for step, score in zip(steps, [*scores, *[None] * len(steps)], strict=False):
        writer.save(step, tensors, STATE, {"data": "d"}, score)
        written = writer.wait()
    return written


def saved(run, step, **tensors):
    """The folder of a checkpoint."""
    assert save(run, step, tensors=tensors or TENSORS).error is None
    return run / "checkpoints" / f"step-{step:08d}"


def names(run):
    return checkpoints_of(run).names()


def flip(path, bit):
    damaged = bytearray(path.read_bytes())
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)


def test_what_is_saved_is_loaded_and_anyone_can_read_it(tmp_path):
    written = save(tmp_path, 3)
    path = tmp_path / "checkpoints/step-00000003"
    checkpoint = found_checkpoint(tmp_path)
    assert written.error is None and str(path) == written.where
    assert checkpoint.path == path == found_checkpoint(path).path
    assert written.bytes == sum(
        file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"
    )
    for loaded in (checkpoint.tensors(), load_file(path / SHARD.format(1))):
        assert loaded.keys() == TENSORS.keys()
        assert all(loaded[name].dtype == TENSORS[name].dtype for name in TENSORS)
        assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert checkpoint.state() == STATE
    assert checkpoint.tensors("memory.").keys() == {"memory.labels", "memory.none"}
    path.rename(tmp_path / "step-00000003")
    assert found_checkpoint(tmp_path / "step-00000003").step == 3


def test_training_goes_on_and_changes_the_state_while_it_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(
        "distap.checkpoint.writer.write_tensors",
        lambda *arguments: (may_write.wait(60), write_tensors(*arguments)),
    )
    changing = {"a": torch.zeros(1000, 1000)}
    writer = writer_to(tmp_path)
    writer.save(1, changing, STATE, {})
    assert not writer.outcomes
    changing["a"] += 1  # as a step does
    assert names(tmp_path) == []
    may_write.set()
    assert writer.wait().error is None
    assert not found_checkpoint(tmp_path).tensors()["a"].any()


def test_a_disk_that_hangs_ends_the_training_and_may_be_tried_again(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("distap.checkpoint.writer.write_tensors", lambda *_: answers.wait())
    writer = writer_to(tmp_path, timeout_seconds=1)
    writer.save(1, TENSORS, STATE, {})
    for go_on in (writer.wait, lambda: writer.save(2, TENSORS, STATE, {})):
        with raises("checkpoint.late", tmp_path, "0.95") as caught:
            go_on()
        assert caught.value.status == FAILED
    answers.set()


def _killed_while_writing(run, call):
    """Write a step again and die at the `call`-th change of a file or folder."""
    left = [call]

    def count(event, _):
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    import sys

    sys.addaudithook(count)
    save(run, 3, keep=1, tensors={"network.a": torch.ones(2)})


def test_a_step_that_is_written_again_can_be_killed_at_every_moment(tmp_path):
    save(tmp_path, 3, keep=1)
    before = found_checkpoint(tmp_path).tensors()
    context = get_context("fork")
    for call in range(1, 400, 3):
        process = context.Process(target=_killed_while_writing, args=(tmp_path, call))
        process.start()
        process.join()
        checkpoint = found_checkpoint(tmp_path).tensors()
        if process.exitcode == 0:
            break
        assert checkpoint.keys() in (before.keys(), {"network.a"})
    assert call > 15 and process.exitcode == 0
    save(tmp_path, 3, keep=1, tensors={"network.a": torch.ones(2)})
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert found_checkpoint(tmp_path).tensors()["network.a"].equal(torch.ones(2))


def test_thirty_flipped_bits_are_found_and_the_checkpoint_before_is_used(tmp_path, caplog):
    save(tmp_path, 1, 2)
    newest = tmp_path / "checkpoints/step-00000002"
    files = sorted(newest.iterdir())
    whole = {file: file.read_bytes() for file in files}
    generator = np.random.default_rng(0)
    for file in [file for file in files for _ in range(10)]:
        flip(file, int(generator.integers(8 * len(whole[file]))))
        caplog.clear()
        assert newest_on_disk(tmp_path).step == 1
        assert f"{newest}: damaged checkpoint: {file.name}" in caplog.text
        with raises("checkpoint.damaged", "00000002", kind=DamagedCheckpointError):
            found_checkpoint(newest)
        file.write_bytes(whole[file])
    assert newest_on_disk(tmp_path).step == 2


@pytest.mark.parametrize("write", [pickle.dumps, "torch"])
def test_pickles_in_the_place_of_files_run_no_code(tmp_path, write):
    path = saved(tmp_path, 1)
    evil = {"a": Evil(open, str(tmp_path / "written"), "w")}
    for file in (SHARD.format(1), "state.json"):
        torch.save(evil, path / file) if write == "torch" else (path / file).write_bytes(
            write(evil)
        )
    (path / ".metadata").write_bytes(pickle.dumps(evil))
    rewrite_manifest(path)
    for read in (found_checkpoint(path).tensors, found_checkpoint(path).state):
        with pytest.raises(DamagedCheckpointError):
            read()
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../step-00000002/state.json", ".metadata", "shard-1.pt"]
)
def test_a_manifest_lists_the_files_of_a_checkpoint_and_no_others(tmp_path, name):
    path = saved(tmp_path, 1)
    identity = checkpoints_of(tmp_path).manifest(path.name).files["state.json"]
    rewrite_manifest(path, files={name: identity})
    with raises("checkpoint.damaged", kind=DamagedCheckpointError):
        found_checkpoint(path)


def test_what_the_manifest_does_not_list_is_not_read(tmp_path):
    path = saved(tmp_path, 1)
    (path / "more.safetensors").write_bytes((path / SHARD.format(1)).read_bytes())
    with raises("checkpoint.damaged", "more.safetensors", kind=DamagedCheckpointError):
        found_checkpoint(path).tensors()
    (path / "more.safetensors").unlink()
    (path / SHARD.format(1)).unlink()
    (path / SHARD.format(1)).symlink_to("/dev/zero")
    with raises("checkpoint.damaged", "00001", kind=DamagedCheckpointError):
        found_checkpoint(path)


def test_a_tensor_that_is_larger_than_the_files_is_refused_before_there_is_memory_for_it(tmp_path):
    path = saved(tmp_path, 1, a=torch.zeros(1))
    shard = path / SHARD.format(1)
    size = 2**45
    text = shard.read_bytes().replace(b"[0]", f"[{size}]".encode())
    header = int.from_bytes(text[:8], "little") + len(str(size)) - 1
    shard.write_bytes(header.to_bytes(8, "little") + text[8:])
    rewrite_manifest(path)
    with raises("checkpoint.damaged", "140,737,488,355,332", kind=DamagedCheckpointError):
        found_checkpoint(path).tensors()


@pytest.mark.parametrize("content", ["[]", "{}", '{"recipe": 1}', "1e999"])
def test_a_state_without_what_is_needed_is_damaged(tmp_path, content):
    path = saved(tmp_path, 1)
    (path / "state.json").write_text(content)
    rewrite_manifest(path)
    with raises("checkpoint.damaged", "state.json", kind=DamagedCheckpointError):
        found_checkpoint(path).state("recipe")


def test_a_manifest_of_another_format_is_refused_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr("distap.checkpoint.manifest.MANIFEST_FORMAT", 2)
    path = saved(tmp_path, 1)
    monkeypatch.undo()
    with raises("checkpoint.other_version", "2"):
        found_checkpoint(path)


def _save_on_rank(world, run):
    tensors = {f"network.{name}": torch.full((100, 100), float(name)) for name in range(8)}
    written = save(run, 4, tensors=tensors, world=world)
    return written.error, sorted(
        path.name for path in (run / "checkpoints/step-00000004").iterdir()
    )


def _load_on_rank(world, run):
    return {
        name: float(tensor.mean()) for name, tensor in newest_on_disk(run, world).tensors().items()
    }


def _damage_seen_by_one_rank(world, run):
    return newest_on_disk(run, world).step


def test_ranks_share_the_writing_and_another_number_of_them_reads_it(tmp_path):
    (error, files), _ = on_ranks(2, _save_on_rank, tmp_path)
    assert error is None
    assert files == ["manifest.json", SHARD.format(1), SHARD.format(2), "state.json"]
    sizes = [
        (tmp_path / "checkpoints/step-00000004" / SHARD.format(rank)).stat().st_size
        for rank in (1, 2)
    ]
    assert max(sizes) < 1.5 * min(sizes)
    expected = {f"network.{name}": float(name) for name in range(8)}
    assert on_ranks(3, _load_on_rank, tmp_path) == [expected] * 3
    assert _load_on_rank(World(), tmp_path) == expected
    save(tmp_path, 5)
    flip(tmp_path / "checkpoints/step-00000005/state.json", 80)
    assert on_ranks(3, _damage_seen_by_one_rank, tmp_path) == [4] * 3


def _fill_the_disk(world, run):
    writer = writer_to(run, world)
    errors = []
    for step, size, score in ((1, 1000, 0.3), (2, 300_000, 0.9), (3, 1000, 0.5)):
        writer.save(step, {"a": torch.zeros(size), "b": torch.zeros(size)}, STATE, {}, score)
        errors.append(writer.wait().error)
    return *errors, writer.best


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_costs_one_checkpoint_and_leaves_the_others(small_disk, ranks):
    run = small_disk("1m")
    for first, second, third, best in on_ranks(ranks, _fill_the_disk, run):
        assert first is third is None
        assert best == 0.5  # not that of the one that is not there
        assert re.search(r"\(it takes 2\.4 MB; the disk has room for [01]\.\d MB\)", second)
    assert names(run) == ["step-00000001", "step-00000003"]


SHORT_OF_MEMORY = """
import resource, sys, torch
from pathlib import Path
from stores import writer_to
writer = writer_to(Path(sys.argv[1]))
writer.save(1, {"a": torch.zeros(3)}, {}, {})
writer.wait()
tensors = {"a": torch.zeros(50_000_000)}
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 350 * 2**20, -1))
writer.save(2, tensors, {}, {})
print(writer.wait().error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
writer.save(3, tensors, {}, {})
print(writer.wait().error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_that_runs_out_costs_one_checkpoint(tmp_path):
    helpers = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | helpers, timeout=300
    )
    first, second = ended.stdout.splitlines()
    assert "memory ran out: writing a checkpoint takes 400.0 MB" in first
    assert second == "None"
    assert [path.name for path in (tmp_path / "checkpoints").glob("*/manifest.json")] == [
        "manifest.json"
    ] * 2
