import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from servers import gcs_server, s3_files, s3_server
from stores import stored_at

from distap.checkpoint.finding import newest_checkpoint, probe
from distap.checkpoint.manifest import DamagedCheckpointError
from distap.checkpoint.writer import CheckpointWriter
from distap.errors import DistapError
from distap.storage.files import LocalStorage, Storage
from distap.storage.remotes import UnreachableError
from distap.world import World

TENSORS = {"network.a": torch.arange(6.0).view(2, 3), "memory.labels": torch.arange(4)}
STATE = {"step": 3, "names": ["x"]}


@pytest.fixture
def stored(tmp_path):
    """A run in a store that is a folder."""
    return stored_at(f"file://{tmp_path}/store")


def save(stored, run, *steps, scores=(), tensors=TENSORS, world=None, keep=9):
    """Write checkpoints; what became of the last one."""
    writer = CheckpointWriter(run / "checkpoints", world or World(), keep, timeout_seconds=60, stored=stored)
    for step, score in zip(steps, [*scores, *[None] * len(steps)], strict=False):
        writer.save(step, tensors, STATE, {"data": "d"}, score)
        written = writer.wait()
    return written


def steps(stored):
    return [int(name[5:13]) for name in stored.names()]


def newest(stored, run, world=None):
    """Step, tensors and state of what a run would go on from, and what it passes over."""
    with newest_checkpoint(run / "checkpoints", world or World(), stored) as found:
        if found is None:
            return None
        return found.checkpoint.step, found.checkpoint.tensors(), found.checkpoint.state(), found.passed_over


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def flip(stored, name, file):
    path = Path(stored.where(name).removeprefix("file://")) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["s3", "gs", "file"])
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # of aiohttp, about gcsfs
def test_what_one_host_saves_another_loads(tmp_path, kind):
    large = {"network.large": torch.rand(9_000_000)}  # sent in parts
    servers = {"s3": s3_server, "gs": gcs_server, "file": lambda: nullcontext({})}
    with servers[kind]() as options:
        url = f"file://{tmp_path}/store" if kind == "file" else f"{kind}://shards/round"
        stored = stored_at(url, options)
        probe(stored, World())
        assert stored.store.sizes(".probes") == {}
        assert newest(stored, tmp_path / "first") is None
        written = save(stored, tmp_path / "first", 2, 3, tensors=TENSORS | large)
        assert written.error is None
        step, tensors, state, passed_over = newest(stored_at(url, options), tmp_path / "second")
        assert (step, state, passed_over) == (3, STATE, [])
        assert same(tensors, TENSORS | large)
    for host in ("first", "second"):
        assert list((tmp_path / host / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "file", [".metadata", "shard-00001-model-00001-of-00001.safetensors", "state.json", "manifest.json"]
)
def test_a_damaged_file_is_found_and_the_checkpoint_before_is_used(tmp_path, stored, file, caplog):
    save(stored, tmp_path / "run", 1, 2)
    damaged = stored.names()[1]
    flip(stored, damaged, file)
    step, _, _, passed_over = newest(stored, tmp_path / "run")
    assert (step, passed_over) == (1, [damaged])
    assert f"{stored.where(damaged)}: damaged checkpoint: {file}" in caplog.text


def test_a_missing_file_is_found(tmp_path, stored):
    save(stored, tmp_path / "run", 1, 2)
    stored.store.remove(f"checkpoints/{stored.names()[1]}/state.json")
    assert newest(stored, tmp_path / "run")[0] == 1


def test_when_all_are_damaged_training_does_not_start_anew(tmp_path, stored):
    save(stored, tmp_path / "run", 1, 2)
    for name in stored.names():
        flip(stored, name, "state.json")
    with pytest.raises(DistapError, match=r"checkpoint\.store: file://.*none of the 2 .*step-00000002.*state\.json"):
        newest(stored, tmp_path / "run")


def test_what_arrives_damaged_is_downloaded_once_more(tmp_path, stored, monkeypatch, caplog):
    save(stored, tmp_path / "run", 1)
    download, broken = Storage.download, ["shard-00001-model-00001-of-00001.safetensors"]

    def break_once(store, name, path):
        download(store, name, path)
        if path.name in broken:
            broken.remove(path.name)
            path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(Storage, "download", break_once)
    assert newest(stored, tmp_path / "run")[0] == 1
    assert "shard-00001-model-00001-of-00001.safetensors arrived damaged; downloading again" in caplog.text


def test_a_store_that_cannot_be_read_is_no_reason_to_take_an_older_checkpoint(tmp_path, stored, monkeypatch):
    save(stored, tmp_path / "run", 1, 2)
    newer = stored.names()[1]

    def unreachable(store, name, path):
        raise UnreachableError(f"{store.where(name)}: the network is down")

    monkeypatch.setattr(Storage, "download", unreachable)
    with pytest.raises(UnreachableError, match=f"{newer}.*the network is down"):
        newest(stored, tmp_path / "run")


def test_what_was_sent_without_its_manifest_is_no_checkpoint_and_the_next_one_removes_it(tmp_path, stored):
    """As a process leaves it that is killed between the files and the manifest."""
    save(stored, tmp_path / "run", 1)
    whole = stored.names()[0]
    folder = Path(stored.where(whole).removeprefix("file://"))
    half = folder.with_name("step-00000002.0123abcd")
    half.mkdir()
    for file in ("state.json", "shard-00001-model-00001-of-00001.safetensors"):
        (half / file).write_bytes((folder / file).read_bytes())
    assert stored.names() == [whole]
    assert newest(stored, tmp_path / "run")[0] == 1
    save(stored, tmp_path / "run", 3)
    assert steps(stored) == [1, 3]
    assert not half.exists()


def test_the_newest_and_the_best_stay_in_the_store(tmp_path, stored):
    save(stored, tmp_path / "run", 1, 2, 3, 10, 20, scores=(0.1, 0.5, 0.3), keep=2)
    assert steps(stored) == [2, 10, 20]
    assert stored.manifest(stored.best()[1]).step == 2


def test_as_many_stay_in_the_store_as_the_recipe_says(tmp_path, stored):
    kept = []
    for step in range(1, 7):
        save(stored, tmp_path / "run", step, keep=4)
        kept.append(steps(stored))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_a_checkpoint_that_is_written_again_takes_the_place_of_the_one_of_its_step(tmp_path, stored):
    """As after a request to stop that came before the evaluation: the same state, then with a score."""
    save(stored, tmp_path / "run", 1, 2)
    before = stored.names()
    save(stored, tmp_path / "run", 2, scores=(0.7,))
    assert steps(stored) == [1, 2]
    assert stored.names()[0] == before[0]
    assert stored.names()[1] != before[1]
    assert stored.best()[0] == 0.7


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_nothing_is_removed_while_the_best_may_be_one_that_cannot_be_read(tmp_path, monkeypatch, caplog, kind):
    stored = stored_at(f"file://{tmp_path}/store") if kind == "store" else None
    with monkeypatch.context() as patch:
        patch.setattr("distap.checkpoint.manifest.FORMAT", 3)
        save(stored, tmp_path / "run", 1, scores=(0.9,), keep=1)
    if stored is not None:
        stored = stored_at(stored.store.base)
    for step, score in ((2, 0.1), (3, 0.2)):
        assert save(stored, tmp_path / "run", step, scores=(score,), keep=1).error is None
    folder = tmp_path / ("store" if stored else "run") / "checkpoints"
    assert sorted(path.name[:13] for path in folder.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert "an old checkpoint cannot be removed" in caplog.text
    assert "format 3 of checkpoints" in caplog.text


def test_a_checkpoint_goes_manifest_first(tmp_path, monkeypatch, stored):
    save(stored, tmp_path / "run", 1, keep=1)
    removed, remove = [], Storage.remove
    monkeypatch.setattr(Storage, "remove", lambda store, name: (removed.append(name), remove(store, name)))
    save(stored, tmp_path / "run", 2, keep=1)
    assert [Path(name).name for name in removed] == [
        "manifest.json",
        ".metadata",
        "shard-00001-model-00001-of-00001.safetensors",
        "state.json",
    ]


def test_a_damaged_checkpoint_is_set_aside_and_does_not_count_among_the_newest(tmp_path, stored):
    save(stored, tmp_path / "run", 4, keep=1)
    stored.set_aside(stored.names()[0])
    assert stored.names() == []
    save(stored, tmp_path / "run", 2, keep=1)
    assert steps(stored) == [2]
    save(stored, tmp_path / "run", 5, keep=1)
    stored.set_aside(stored.names()[0])
    assert [path.name[:13] for path in (tmp_path / "store/checkpoints").iterdir()] == ["step-00000005"]


def test_a_later_checkpoint_that_cannot_be_set_aside_does_not_push_new_ones_out(tmp_path, stored):
    save(stored, tmp_path / "run", 9, keep=1)
    save(stored, tmp_path / "run", 2, keep=1)
    assert steps(stored) == [2, 9]


def block(tmp_path):
    """Have nothing more written into the store."""
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file where the folder was")


def unblock(tmp_path):
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")


def test_what_the_store_cannot_take_stays_here_until_it_has_a_newer_one(tmp_path, stored):
    writer = CheckpointWriter(tmp_path / "run/checkpoints", World(), 9, timeout_seconds=60, stored=stored)
    outcomes = []
    for step in (1, 2, 3, 4):
        block(tmp_path) if step == 2 else unblock(tmp_path) if step == 4 else None
        writer.save(step, TENSORS, STATE, {})
        outcomes.append(writer.wait())
        here = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
        assert here == {1: [], 2: ["step-00000002"], 3: ["step-00000003"], 4: []}[step]
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
    assert not outcomes[1].may_pass
    assert f"it stays in {tmp_path}/run/checkpoints/step-00000002" in outcomes[1].error
    assert steps(stored) == [1, 4]


def test_what_only_the_disk_has_is_gone_on_from_and_can_be_brought_to_the_store(tmp_path, stored):
    save(stored, tmp_path / "run", 1)
    block(tmp_path)
    save(stored, tmp_path / "run", 2)
    unblock(tmp_path)
    with newest_checkpoint(tmp_path / "run/checkpoints", World(), stored) as found:
        assert found.name is None
        assert found.checkpoint.path == tmp_path / "run/checkpoints/step-00000002"
        stored.add(found.checkpoint.path, found.checkpoint.manifest)
    assert steps(stored) == [1, 2]
    assert newest(stored, tmp_path / "elsewhere")[0] == 2


def _hosts(world, folder):
    """This rank as the only one of a host of its own, and its run folder there."""
    return dataclasses.replace(world, local_rank=0), folder / f"host-{world.rank}"


def _two_hosts(world, folder, options):
    url = "s3://shards/hosts"
    world, run = _hosts(world, folder)
    stored = stored_at(url, options)
    probe(stored, world)
    tensors = {f"network.{name}": torch.full((100, 100), float(name)) for name in range(8)}
    assert save(stored, run, 2, tensors=tensors, world=world).error is None
    step, loaded, _, _ = newest(stored, run, world)
    assert step == 2
    assert same(loaded, tensors)
    # Rank 0 alone has something newer on its disk.
    if world.rank == 0:
        save(None, run, 3, tensors=TENSORS)
    world.barrier()
    assert newest(stored, run, world)[0] == 2
    if world.rank == 0:
        name = stored.names()[-1]
        path = f"shards/hosts/checkpoints/{name}/shard-00002-model-00001-of-00001.safetensors"
        files = s3_files(options)
        data = bytearray(files.cat_file(path))
        data[300] ^= 8
        save(stored, folder / "alone", 1)
        files.pipe_file(path, bytes(data))
    world.barrier()
    found = newest(stored, run, world)
    # Rank 1's store is elsewhere: half of the checkpoint is missing, and it must not count on either.
    elsewhere = stored_at(f"file://{folder}/store-{world.rank}")
    failed = save(elsewhere, run, 5, tensors=tensors, world=world)
    return found[0], [name[:13] for name in found[3]], failed, elsewhere.names()


def test_two_hosts_share_nothing_but_the_store(tmp_path):
    with s3_server() as options:
        answers = on_ranks(2, _two_hosts, tmp_path, options)
    for step, passed_over, failed, names in answers:
        assert (step, passed_over, names) == (1, ["step-00000002"], [])
        assert "shard-00002-model-00001-of-00001.safetensors was sent" in failed.error
        assert "and is not there; do all hosts write to the same store?" in failed.error
        assert failed.may_pass
    left = [path.name for path in (tmp_path / "host-1/checkpoints").iterdir()]
    assert left == []


def _shared_folder(world, folder):
    stored = stored_at(f"file://{folder}/store")
    error = save(stored, folder / "run", 1, 2, tensors={"network.a": torch.ones(9)}, world=world).error
    if world.rank == 0:
        flip(stored, stored.names()[1], "state.json")
    world.barrier()
    return error, newest(stored, folder / "run", world)[0]


def test_two_ranks_of_a_host_share_its_folder(tmp_path):
    assert on_ranks(2, _shared_folder, tmp_path) == [(None, 1)] * 2
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    assert newest(stored_at(f"file://{tmp_path}/store"), tmp_path / "one")[0] == 1


def _program_fails_on_rank_1(world, folder):
    if world.rank == 1:
        Storage.upload = LocalStorage.upload = None
    return save(stored_at(f"file://{folder}/store"), folder / "run", 1, world=world).error


def test_an_error_of_the_program_on_one_rank_is_heard_by_all(tmp_path):
    first, second = on_ranks(2, _program_fails_on_rank_1, tmp_path)
    assert first == f"rank 1: {second}"
    assert "'NoneType' object is not callable" in second
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_what_is_beside_checkpoints_goes_there_and_comes_back(tmp_path, stored):
    first, second = tmp_path / "first", tmp_path / "second"
    for name, text in (("metrics.jsonl", "1\n2\n"), ("evaluations/step-00000001/result.json", "{}"), ("other", "x")):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(text)
    (first / "not_finite.jsonl").write_text("a\nb\n")
    save(stored, first, 1)
    # This host's own: lines of a log that go on there, and of one that only it has.
    second.mkdir()
    (second / "metrics.jsonl").write_text("1\n9\n")
    (second / "not_finite.jsonl").write_text("b\nc\n")
    stored.fetch_beside(second)
    assert (second / "metrics.jsonl").read_text() == "1\n2\n"
    assert (second / "not_finite.jsonl").read_text() == "a\nb\nc\n"
    assert (second / "evaluations/step-00000001/result.json").read_text() == "{}"
    assert not (second / "other").exists()
    (first / "evaluations/step-00000001/result.json").unlink()
    (first / "metrics.jsonl").write_text("1\n2\n3\n")
    save(stored, first, 2)
    assert stored.store.read_whole("metrics.jsonl") == b"1\n2\n3\n"
    assert stored.store.sizes("evaluations") == {}


def test_a_name_in_the_store_leads_nowhere_else(tmp_path, stored):
    class Evil(LocalStorage):
        def names(self, pattern):
            return [*super().names(pattern), "evaluations/../x"]

    stored.store.write("x", b"")
    stored.store.__class__ = Evil
    stored.store.write("evaluations/step-00000001/result.json", b"{}")
    stored.fetch_beside(tmp_path / "run/here")
    assert (tmp_path / "run/here/evaluations/step-00000001/result.json").exists()
    assert not (tmp_path / "run/here/x").exists()


def test_a_manifest_that_lists_foreign_files_is_refused(tmp_path, stored):
    save(stored, tmp_path / "run", 1)
    name = stored.names()[0]
    manifest = stored.manifest(name)
    foreign = dataclasses.replace(manifest, files=manifest.files | {"../../x": manifest.files["state.json"]})
    stored.store.write(f"checkpoints/{name}/manifest.json", foreign.text().encode())
    with pytest.raises(DamagedCheckpointError, match="lists other files than a checkpoint's"):
        stored_at(stored.store.base).manifest(name)
