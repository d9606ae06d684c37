import json
import pickle
import re
import shutil
import threading
import types
from dataclasses import replace
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import on_ranks
from stores import found_checkpoint, newest_on_disk

from distap.checkpoint.folder import best_checkpoint, list_checkpoints, set_aside
from distap.checkpoint.manifest import DamagedCheckpointError, read_manifest, write_manifest
from distap.checkpoint.tensors import write_tensors
from distap.checkpoint.writer import CheckpointWriter
from distap.errors import FAILED, DistapError
from distap.storage.hashing import file_identity
from distap.world import World

TENSORS = {"network.a": torch.arange(6.0).view(2, 3), "network.b": torch.tensor(7), "memory.labels": torch.arange(4)}
STATE = {"step": 3, "names": ["x"]}


def save(folder, *steps, keep=99, scores=(), tensors=TENSORS, world=None):
    writer = CheckpointWriter(folder, world or World(), keep)
    for step, score in zip(steps, [*scores, *[None] * len(steps)], strict=False):
        writer.save(step, tensors, STATE, {"data": "d"}, score)
        written = writer.wait()
    return written


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def flip(path, bit):
    damaged = bytearray(path.read_bytes())
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)


def rewrite_manifest(path):
    """Make the manifest fit what is in the folder, as someone who means harm would."""
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, files={name: file_identity(path / name) for name in manifest.files}))


def test_what_is_saved_is_loaded(tmp_path):
    written = save(tmp_path / "checkpoints", 3)
    checkpoint = found_checkpoint(tmp_path)
    assert checkpoint.path == written.path == found_checkpoint(written.path).path
    assert written.error is None
    assert written.bytes == sum(
        file.stat().st_size for file in written.path.iterdir() if file.name != "manifest.json"
    )
    loaded = checkpoint.tensors()
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert checkpoint.state() == STATE
    assert checkpoint.tensors("memory.").keys() == {"memory.labels"}


def test_training_goes_on_and_changes_the_state_while_it_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(
        "distap.checkpoint.writer.write_tensors", lambda *given: (may_write.wait(60), write_tensors(*given))
    )
    changing = {"a": torch.zeros(1000, 1000)}
    writer = CheckpointWriter(tmp_path, World(), keep=1)
    writer.save(1, changing, STATE, {})
    assert writer.poll() is None
    changing["a"] += 1  # as a step does
    assert list_checkpoints(tmp_path) == []
    may_write.set()
    assert writer.wait().error is None
    assert not found_checkpoint(list_checkpoints(tmp_path)[0]).tensors()["a"].any()


def test_a_disk_that_hangs_ends_the_training_and_may_be_tried_again(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("distap.checkpoint.writer.write_tensors", lambda *_: answers.wait())
    writer = CheckpointWriter(tmp_path, World(), keep=1, timeout_seconds=1)
    writer.save(1, TENSORS, STATE, {})
    for go_on in (writer.wait, lambda: writer.save(2, TENSORS, STATE, {})):
        with pytest.raises(DistapError, match=rf"{tmp_path}: training has waited 0.95 s .* hangs") as caught:
            go_on()
        assert caught.value.status == FAILED
    answers.set()


def test_the_newest_and_the_best_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 10, 20, keep=2, scores=(0.1, 0.5, 0.3))
    assert names(tmp_path) == ["step-00000002", "step-00000010", "step-00000020"]
    assert best_checkpoint(tmp_path)[1].name == "step-00000002"


def test_the_best_of_a_run_is_found(tmp_path):
    save(tmp_path / "checkpoints", 1, 2, 3, scores=(0.1, 0.5, 0.3))
    assert found_checkpoint(tmp_path, best=True).step == 2
    with pytest.raises(DistapError, match="no checkpoint there has been evaluated"):
        found_checkpoint(tmp_path.parent, best=True)


def test_an_unfinished_checkpoint_is_no_checkpoint_and_the_next_one_removes_it(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-00000002.tmp-1234abcd").mkdir()
    assert names(tmp_path) == ["step-00000001"]
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_step_that_is_written_again_is_there_at_every_moment(tmp_path, monkeypatch):
    save(tmp_path, 3, keep=1)
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.0123abcd")  # as an interruption leaves one
    save(tmp_path, 3, keep=1)
    there = []

    def watched(change):
        def changed(*arguments, **options):
            there.append(names(tmp_path))
            result = change(*arguments, **options)
            there.append(names(tmp_path))
            newest_on_disk(tmp_path, World())[0].tensors()
            return result

        return changed

    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    assert save(tmp_path, 3, keep=1, tensors={"network.a": torch.ones(2)}).error is None
    assert len(there) > 4 and all(there)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000003"] and len(list(tmp_path.iterdir())) == 1
    assert newest_on_disk(tmp_path, World())[0].tensors()["network.a"].equal(torch.ones(2))


def test_thirty_flipped_bits_are_found_and_the_checkpoint_before_is_used(tmp_path, caplog):
    save(tmp_path, 1, 2)
    newest = tmp_path / "step-00000002"
    files = sorted(newest.iterdir())
    whole = {file: file.read_bytes() for file in files}
    sizes = np.array([len(whole[file]) for file in files], dtype=float)
    generator = np.random.default_rng(0)
    # Every file has its turn, the small ones too.
    chosen = [*files, *generator.choice(np.array(files, dtype=object), 30 - len(files), p=sizes / sizes.sum())]
    for file in chosen:
        flip(file, int(generator.integers(8 * len(whole[file]))))
        caplog.clear()
        checkpoint, passed_over = newest_on_disk(tmp_path, World())
        assert checkpoint.step == 1
        assert passed_over == [newest.name]
        assert "step-00000002: damaged checkpoint" in caplog.text
        with pytest.raises(DamagedCheckpointError, match="step-00000002: damaged checkpoint"):
            found_checkpoint(newest)
        file.write_bytes(whole[file])
    assert newest_on_disk(tmp_path, World())[0].step == 2


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["removed", "cut", "empty"])
def test_a_missing_or_cut_file_is_found(tmp_path, file, damage):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / file
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"")
    assert newest_on_disk(tmp_path, World())[0].step == 1


def test_when_all_are_damaged_training_does_not_start_anew(tmp_path):
    save(tmp_path, 1, 2)
    for path in list_checkpoints(tmp_path):
        (path / "manifest.json").unlink()
    with pytest.raises(DistapError, match=r"none of the 2 checkpoints can be used.*step-00000002.*manifest\.json"):
        newest_on_disk(tmp_path, World())


def test_a_damaged_checkpoint_is_set_aside_and_the_last_such_one_kept(tmp_path):
    save(tmp_path, 1, 2)
    set_aside(tmp_path / "step-00000002")
    save(tmp_path, 3)
    set_aside(tmp_path / "step-00000003")
    assert names(tmp_path) == ["step-00000001"]
    assert [path.name for path in tmp_path.glob("damaged-*")] == ["damaged-step-00000003"]


class Evil:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_evil_metadata_run_no_code(tmp_path):
    path = save(tmp_path, 1).path
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "written")))
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError, match=r"io\.open is no part of a checkpoint's metadata"):
        found_checkpoint(path).tensors()
    assert not (tmp_path / "written").exists()


class GetattrPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do, and the attribute of another thing where asked to."""

    def reducer_override(self, value):
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        if isinstance(value, types.SimpleNamespace):
            return getattr, (torch.Size, value.attribute)
        return NotImplemented


def repickle(path, *attributes):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = [types.SimpleNamespace(attribute=attribute) for attribute in attributes]
    with (path / ".metadata").open("wb") as file:
        GetattrPickler(file).dump(metadata)
    rewrite_manifest(path)


def test_metadata_of_another_python_are_read(tmp_path):
    path = save(tmp_path, 1).path
    repickle(path)
    assert torch.equal(found_checkpoint(path).tensors()["network.a"], TENSORS["network.a"])


def test_metadata_reach_no_attribute_but_members_of_enums(tmp_path):
    path = save(tmp_path, 1).path
    repickle(path, "__subclasses__")
    with pytest.raises(
        DamagedCheckpointError, match=r"an attribute of .*Size.* is no part of a checkpoint's metadata"
    ):
        found_checkpoint(path).tensors()


def test_evil_tensor_files_run_no_code(tmp_path):
    path = save(tmp_path, 1, tensors={"a": torch.zeros(3)}).path
    torch.save({"a": Evil(tmp_path / "written")}, path / "__0_0.distcp")
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError):
        found_checkpoint(path).tensors()
    assert not (tmp_path / "written").exists()


def test_pickled_bytes_among_the_tensors_are_not_loaded(tmp_path):
    """torch.distributed.checkpoint would unpickle what is no tensor without asking."""
    path = save(tmp_path, 1).path
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    (path / ".metadata").unlink()
    dcp_save({"a": Evil(tmp_path / "written")}, storage_writer=FileSystemWriter(path), no_dist=True)
    (tmp_path / "written").unlink(missing_ok=True)
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError, match=r"something else than tensors|no part of a checkpoint"):
        found_checkpoint(path).tensors()
    assert not (tmp_path / "written").exists()


def test_metadata_lead_to_no_file_outside_the_checkpoint(tmp_path):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002"
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for place in metadata.storage_data.values():
        place.relative_path = "../step-00000001/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError, match="names a foreign file"):
        found_checkpoint(path).tensors()


@pytest.mark.parametrize(
    "change",
    [
        {"/etc/hostname": "more"},
        {"../step-00000002/state.json": "more"},
        {"state.json": "gone"},
        {".metadata": "gone"},
    ],
    ids=str,
)
def test_a_manifest_lists_the_files_of_a_checkpoint_and_no_others(tmp_path, change):
    path = save(tmp_path, 1).path
    manifest = read_manifest(path)
    ((name, how),) = change.items()
    if how == "more":
        write_manifest(path, replace(manifest, files=manifest.files | {name: manifest.files["state.json"]}))
    else:
        write_manifest(path, replace(manifest, files={n: f for n, f in manifest.files.items() if n != name}))
    with pytest.raises(DamagedCheckpointError, match="lists other files than a checkpoint's"):
        found_checkpoint(path)


def test_what_is_no_file_is_not_read(tmp_path):
    path = save(tmp_path, 1).path
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match="__0_0"):
        found_checkpoint(path)


def test_a_tensor_that_is_larger_than_the_files_is_refused_before_there_is_memory_for_it(tmp_path):
    path = save(tmp_path, 1).path
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["network.a"].size = torch.Size([2**45])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError, match=r"network\.a is to have 140,737,488,355,328 bytes"):
        found_checkpoint(path).tensors()


@pytest.mark.parametrize("content", ["[]", "{}", '{"recipe": 1}', "1e999"])
def test_a_state_without_what_is_needed_is_damaged(tmp_path, content):
    path = save(tmp_path, 1).path
    (path / "state.json").write_text(content)
    rewrite_manifest(path)
    with pytest.raises(DamagedCheckpointError, match=r"state\.json has no recipe"):
        found_checkpoint(path).state("recipe")


def test_an_old_checkpoint_that_cannot_be_removed_does_not_spoil_the_new_one(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("Device or resource busy")

    monkeypatch.setattr("distap.checkpoint.writer.remove_old", refuse)
    assert save(tmp_path, 1).error is None
    assert "an old checkpoint cannot be removed: Device or resource busy" in caplog.text
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_of_an_earlier_distap_is_refused_as_such(tmp_path):
    path = tmp_path / "step-00000005"
    path.mkdir()
    (path / "state.pt").touch()
    with pytest.raises(DistapError, match="an earlier version of distap"):
        found_checkpoint(path)


def test_a_manifest_of_another_format_is_refused_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr("distap.checkpoint.manifest.FORMAT", 3)
    path = save(tmp_path, 1).path
    text = (path / "manifest.json").read_text()
    monkeypatch.undo()
    assert json.loads(text)["format"] == 3
    with pytest.raises(DistapError, match="format 3 of checkpoints"):
        found_checkpoint(path)


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(DistapError, match="no checkpoint there"):
        found_checkpoint(tmp_path)
    with pytest.raises(DistapError, match="no checkpoint there"):
        found_checkpoint(tmp_path / "step-00000005")


def _save_on_rank(world, folder):
    tensors = {f"network.{name}": torch.full((100, 100), float(name)) for name in range(8)}
    written = save(folder, 4, tensors=tensors, world=world)
    return written.error, sorted(path.name for path in folder.joinpath("step-00000004").iterdir())


def _load_on_rank(world, folder):
    checkpoint, _ = newest_on_disk(folder, world)
    return {name: float(tensor.mean()) for name, tensor in checkpoint.tensors().items()}


def test_ranks_share_the_writing_and_another_number_of_them_reads_it(tmp_path):
    (error, files), _ = on_ranks(2, _save_on_rank, tmp_path)
    assert error is None
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "state.json"]
    sizes = [(tmp_path / "step-00000004" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.5 * min(sizes)
    expected = {f"network.{name}": float(name) for name in range(8)}
    assert on_ranks(3, _load_on_rank, tmp_path) == [expected] * 3
    assert _load_on_rank(World(), tmp_path) == expected


def _damage_seen_by_one_rank(world, folder):
    checkpoint, passed_over = newest_on_disk(folder, world)
    return checkpoint.step, passed_over


def test_damage_that_one_rank_finds_counts_for_all(tmp_path):
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002" / "state.json", 80)
    assert on_ranks(3, _damage_seen_by_one_rank, tmp_path) == [(1, ["step-00000002"])] * 3


def _fill_the_disk(world, folder):
    writer = CheckpointWriter(folder, world, keep=9)
    writer.save(1, {"a": torch.zeros(1000)}, STATE, {})
    first = writer.wait()
    writer.save(2, {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}, STATE, {})
    second = writer.wait()
    writer.save(3, {"a": torch.zeros(1000)}, STATE, {})
    return first.error, second.error, writer.wait().error


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_costs_one_checkpoint_and_leaves_the_others(small_disk, ranks):
    folder = small_disk("1m") / "checkpoints"
    for first, second, third in on_ranks(ranks, _fill_the_disk, folder):
        assert first is third is None
        assert re.search(r"\(it takes 2\.4 MB; [01]\.\d MB are free\)", second)
    assert names(folder) == ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in folder.iterdir()) == names(folder)
