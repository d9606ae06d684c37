"""A checkpoint of one engine holds what another one needs, whatever the number of ranks."""

from dataclasses import replace

import pytest
import torch
from engine_checks import engine_of, three_stages, whole
from ranks import on_ranks
from stores import SHARD, newest_on_disk, writer_to

from distap.world import World, local

NAMES = ("ddp", "fsdp", "fsdp pass", "fsdp hosts")
SHARDED = ("fsdp", "fsdp hosts pass")
HOSTS = ("a", "a", "b", "b")


def on_hosts(world):
    """The same ranks, on two hosts."""
    hosts = HOSTS if world.size == 4 else ("a", "b")
    return replace(world, hosts=hosts[: world.size])


def save(world, folder):
    """The state that two steps of each engine lead to, saved; and the bytes that each rank
    wrote."""
    states = {}
    for name in NAMES:
        engine = engine_of(on_hosts(world), name)
        three_stages(world, engine, steps=2)
        writer = writer_to(folder / name, world, keep=1)
        writer.save(2, engine.state_dict(), {}, {})
        # The copy is made: what comes after changes nothing in it.
        states[name] = whole(engine)
        three_stages(world, engine, first=2)
        written = writer.wait()
        assert written.error is None
        path = folder / name / "checkpoints/step-00000002"
        states[name]["bytes"] = [
            (path / SHARD.format(rank + 1)).stat().st_size for rank in range(world.size)
        ]
    return states


def restore_all(world, folder):
    return {name: restore(world, folder, name) for name in SHARDED}


def restore(world, folder, name):
    """The state that an engine takes from each checkpoint, and the numbers that it read."""
    states = {}
    for saved in NAMES:
        engine = engine_of(on_hosts(world), name)
        tensors = newest_on_disk(folder / saved, world).tensors(shard_of=engine.shard_of)
        engine.load_state_dict(tensors)
        states[saved] = whole(engine)
        states[saved]["numbers"] = sum(local(tensor).numel() for tensor in tensors.values())
    return states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    return on_ranks(2, save, folder)[0]


@pytest.fixture(scope="module")
def restored(saved, folder):
    """Into DDP on one rank, and into FSDP on four."""
    on_four = on_ranks(4, restore_all, folder)[3]
    return {"ddp": restore(World(), folder, "ddp"), **on_four}


@pytest.mark.parametrize("into", ["ddp", *SHARDED])
@pytest.mark.parametrize("name", NAMES)
def test_what_one_engine_saved_is_restored_into_another_on_another_number_of_ranks(
    saved, restored, name, into
):
    state = {key: value for key, value in restored[into][name].items() if key != "numbers"}
    expected = {key: value for key, value in saved[name].items() if key != "bytes"}
    assert any(key.endswith("power.exp_avg_sq") for key in state)
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(state[key], expected[key]) and state[key].shape == expected[key].shape
        for key in state
    )


def test_each_rank_reads_its_own_shards(restored):
    for name in NAMES:
        of_three, of_one = (restored[into][name]["numbers"] for into in ("fsdp", "ddp"))
        assert of_three < 0.5 * of_one  # a third, but numbers without dimensions are whole


def test_each_rank_writes_its_own_shards(saved):
    for name in ("fsdp", "fsdp pass"):
        first, second = saved[name]["bytes"]
        assert first < 1.5 * second
