import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from moto.backends import get_backend
from raising import raises
from ranks import on_ranks
from servers import gcs_server, s3_files, s3_server, s3_server_here
from stores import SHARD, beside, checkpoints_of, writer_to

from distap.checkpoint.finding import newest_checkpoint
from distap.storage import remotes
from distap.storage.files import Storage
from distap.storage.remotes import UnreachableError
from distap.world import World

# of gcsfs
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
TENSORS = {"network.a": torch.arange(6.0).view(2, 3), "memory.labels": torch.arange(4)}
STATE = {"step": 3, "names": ["x"]}


@pytest.fixture
def store(s3, request):
    """The checkpoints of a run in a bucket."""
    return checkpoints_of(f"s3://shards/{request.node.name.replace('[', '-').replace(']', '')}")


def save(checkpoints, spool, *steps, scores=(), tensors=TENSORS, world=None, keep=9, **settings):
    """Write checkpoints; what became of the last one."""
    writer = writer_to(checkpoints, world, keep, spool, timeout_seconds=60, **settings)
    for step, score in zip(steps, [*scores, *[None] * len(steps)], strict=False):
        writer.save(step, tensors, STATE, {"data": "d"}, score)
        written = writer.wait()
    return written


def newest(checkpoints, spool, world=None):
    """Step, tensors and state of what a run would go on from."""
    with newest_checkpoint(checkpoints, spool, world or World()) as checkpoint:
        if checkpoint is None:
            return None
        return checkpoint.step, checkpoint.tensors(), checkpoint.state()


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def flip(checkpoints, name, file):
    path = f"checkpoints/{name}/{file}"
    data = bytearray(checkpoints.storage.read_whole(path))
    data[len(data) // 2] ^= 1
    checkpoints.storage.write(path, bytes(data))


@pytest.mark.parametrize("file", ["manifest.json", "state.json", SHARD.format(1)])
def test_an_object_whose_bits_the_bucket_has_flipped_is_passed_over(file, tmp_path, monkeypatch):
    monkeypatch.setattr(remotes, "FIRST_PAUSE", 0.01)
    with s3_server_here():
        folder = f"flipped-{Path(file).stem}"
        store = checkpoints_of(f"s3://shards/{folder}")
        save(store, tmp_path, 1, 2)
        key = f"{folder}/checkpoints/step-00000002/{file}"
        # with its checksum
        stored = get_backend("s3")["123456789012"]["aws"].buckets["shards"].keys[key]
        data = bytearray(stored.value)
        data[len(data) // 2] ^= 1
        stored.value = bytes(data)
        assert newest(store, tmp_path)[0] == 1


@pytest.mark.parametrize("kind", ["s3", pytest.param("gs", marks=pytest.mark.nightly), "file"])
def test_what_one_host_saves_another_loads(tmp_path, kind):
    large = {"network.large": torch.rand(9_000_000)}  # sent in parts
    servers = {"s3": s3_server, "gs": gcs_server, "file": nullcontext}
    with servers[kind]():
        url = f"file://{tmp_path}/store" if kind == "file" else f"{kind}://shards/round"
        store = checkpoints_of(url)
        assert newest(store, tmp_path / "first") is None
        assert save(store, tmp_path / "first", 2, 3, tensors=TENSORS | large).error is None
        assert store.names() == ["step-00000002", "step-00000003"]
        step, tensors, state = newest(checkpoints_of(url), tmp_path / "second")
        assert (step, state) == (3, STATE)
        assert same(tensors, TENSORS | large)
        for file in (SHARD.format(1), "state.json", "manifest.json"):
            flip(store, "step-00000003", file)
            assert newest(store, tmp_path / "second")[0] == 2
            flip(store, "step-00000003", file)
        store.storage.remove("checkpoints/step-00000003/state.json")
        assert newest(store, tmp_path / "second")[0] == 2
        for file in (SHARD.format(1), "state.json"):
            flip(store, "step-00000002", file)
        with raises("checkpoint.all_damaged", url, "2", "00000003", "state.json"):
            newest(store, tmp_path / "second")
    assert not [path for host in ("first", "second") for path in (tmp_path / host).glob("*")]


def test_a_store_that_cannot_be_read_is_no_reason_to_take_an_older_checkpoint(
    tmp_path, store, monkeypatch
):
    save(store, tmp_path, 1, 2)

    def unreachable(storage, name, path):
        raise UnreachableError("storage.unreachable", f"{storage.where(name)}: the network is down")

    monkeypatch.setattr(Storage, "download", unreachable)
    with pytest.raises(UnreachableError, match=r"step-00000002.*the network is down"):
        newest(store, tmp_path)


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_what_has_no_manifest_is_no_checkpoint_and_the_next_one_removes_it(tmp_path, store, kind):
    """As a process leaves it that is killed between the files and the manifest."""
    checkpoints = store if kind == "store" else checkpoints_of(tmp_path / "run")
    save(checkpoints, tmp_path, 1)
    for file in ("state.json", SHARD.format(1)):
        data = checkpoints.storage.read_whole(f"checkpoints/step-00000001/{file}")
        checkpoints.storage.write(f"checkpoints/step-00000002/{file}", data)
    assert checkpoints.names() == ["step-00000001"]
    assert newest(checkpoints, tmp_path)[0] == 1
    save(checkpoints, tmp_path, 3)
    assert checkpoints.names() == ["step-00000001", "step-00000003"]
    assert not checkpoints.storage.sizes("checkpoints/step-00000002")


def test_as_many_stay_as_the_recipe_says_and_the_best(tmp_path, store):
    kept_names = []
    for step in range(1, 7):
        save(store, tmp_path, step, keep=3, scores=(0.9 if step == 2 else 0.1,))
        kept_names.append([int(name[5:]) for name in store.names()])
    assert kept_names == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4, 5], [2, 4, 5, 6]]


def test_a_checkpoint_that_is_written_again_takes_the_place_of_the_one_of_its_step(tmp_path, store):
    """As after a request to stop that came before the evaluation: the same state, then with a
    score.
    """
    save(store, tmp_path, 1, 2)
    save(store, tmp_path, 2, scores=(0.7,))
    assert store.names() == ["step-00000001", "step-00000002.1"]
    assert store.best()[0] == 0.7
    assert newest(store, tmp_path)[0] == 2


def test_a_checkpoint_goes_manifest_first(tmp_path, monkeypatch, store):
    save(store, tmp_path, 1, keep=1)
    removed = []
    remove = Storage.remove
    monkeypatch.setattr(
        Storage, "remove", lambda store, name: (removed.append(name), remove(store, name))
    )
    save(store, tmp_path, 2, keep=1)
    assert [Path(name).name for name in removed] == ["manifest.json", SHARD.format(1), "state.json"]


def test_checkpoints_of_later_steps_stay_and_do_not_push_new_ones_out(tmp_path, store):
    save(store, tmp_path, 4, 9, keep=2)
    save(store, tmp_path, 2, 4, keep=1)
    assert store.names() == ["step-00000004.1", "step-00000009"]


def _two_hosts(world, folder):
    world, spool = dataclasses.replace(world, local_rank=0), folder / f"host-{world.rank}"
    store = checkpoints_of("s3://shards/hosts")
    tensors = {f"network.{name}": torch.full((100, 100), float(name)) for name in range(8)}
    assert save(store, spool, 1, 2, tensors=tensors, world=world).error is None
    step, loaded, _ = newest(store, spool, world)
    assert step == 2
    assert same(loaded, tensors)
    if world.rank == 0:
        path = f"shards/hosts/checkpoints/step-00000002/{SHARD.format(2)}"
        files = s3_files()
        data = bytearray(files.cat_file(path))
        data[300] ^= 8
        files.pipe_file(path, bytes(data))
    world.barrier()
    checkpoint = newest(store, spool, world)
    # Rank 1's store is elsewhere: half of the checkpoint is missing, and it must not count on
    # either.
    elsewhere = checkpoints_of(f"file://{folder}/store-{world.rank}")
    failed = save(elsewhere, spool, 5, tensors=tensors, world=world)
    return checkpoint[0], failed, elsewhere.names(), list(spool.iterdir())


def test_two_hosts_share_nothing_but_the_store(tmp_path, s3):
    for step, failed, names, left in on_ranks(2, _two_hosts, tmp_path):
        assert (step, names, left) == (1, [], [])
        assert f"{SHARD.format(2)} was written" in failed.error
        assert "and is not there; do all hosts write to the same place?" in failed.error
        assert failed.may_pass


def test_files_next_to_checkpoints_go_there_and_come_back(tmp_path, store):
    first = tmp_path / "first"
    second = tmp_path / "second"
    for name, text in (
        ("metrics.jsonl", "1\n2\n"),
        ("evaluations/step-00000001/result.json", "{}"),
        ("other", "x"),
    ):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(text)
    sent = beside(store.storage, first)
    save(store, tmp_path, 1, beside=sent)
    second.mkdir()
    (second / "metrics.jsonl").write_text("1\n9\n")  # this host's own
    beside(store.storage, second).fetch()
    assert (second / "metrics.jsonl").read_text() == "1\n2\n"
    assert (second / "evaluations/step-00000001/result.json").read_text() == "{}"
    assert not (second / "other").exists()
    (first / "evaluations/step-00000001/result.json").unlink()
    (first / "metrics.jsonl").write_text("1\n2\n3\n")
    save(store, tmp_path, 2, beside=sent)
    assert store.storage.read_whole("metrics.jsonl") == b"1\n2\n3\n"
    assert store.storage.sizes("evaluations") == {}
