"""A checkpoint of one engine holds what another one needs, whatever the number of ranks."""

import pytest
import torch
from engine_checks import engine_of, three_stages, whole
from ranks import on_ranks
from stores import SHARD, newest_on_disk, writer_to

from distap.world import World

NAMES = ("ddp", "fsdp")


def save(world, folder):
    """The state that two steps of each engine lead to, saved; and the bytes that each rank
    wrote."""
    states = {}
    for name in NAMES:
        engine = engine_of(world, name)
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


def restore(world, folder, name):
    """The state that an engine takes from each checkpoint."""
    states = {}
    for saved in NAMES:
        engine = engine_of(world, name)
        engine.load_state_dict(newest_on_disk(folder / saved, world).tensors())
        states[saved] = whole(engine)
    return states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    return on_ranks(2, save, folder)[0]


@pytest.fixture(scope="module")
def restored(saved, folder):
    """Into DDP on one rank, and into FSDP on three."""
    on_three = on_ranks(3, restore, folder, "fsdp")[2]
    return {"ddp": restore(World(), folder, "ddp"), "fsdp": on_three}


@pytest.mark.parametrize("into", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_what_one_engine_saved_is_restored_into_another_on_another_number_of_ranks(
    saved, restored, name, into
):
    state = restored[into][name]
    expected = {key: value for key, value in saved[name].items() if key != "bytes"}
    assert any(key.endswith("power.exp_avg_sq") for key in state)
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(state[key], expected[key]) and state[key].shape == expected[key].shape
        for key in state
    )


def test_each_rank_writes_its_own_shards(saved):
    first, second = saved["fsdp"]["bytes"]
    assert first < 1.5 * second
