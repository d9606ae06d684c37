"""A checkpoint of one engine holds what another one needs, whatever the number of ranks."""

import pytest
import torch
from batches import small_images
from ranks import on_ranks
from stores import SHARD, newest_on_disk, writer_to
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from distap.training.engines import DDPSettings, FSDPSettings
from distap.world import World

ENGINES = {"ddp": DDPSettings(), "fsdp": FSDPSettings()}


class Network(nn.Module):
    """A buffer, a frozen part, a power without dimension, and sizes that divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 5, 3))
        self.power = nn.Parameter(torch.tensor(3.0))
        self.blocks[0].requires_grad_(False)

    def forward(self, images):
        features = self.blocks(images.to(self.power.dtype)).clamp(min=1e-3)
        return normalize(features.pow(self.power).mean((2, 3)).pow(1 / self.power))


def engine_named(name, world, seed=0):
    torch.manual_seed(seed)
    network = Network().double().eval()

    def build():
        return torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=0.0)

    return ENGINES[name].build(network, build, world)


def train(engine, world, steps):
    images, _ = small_images(6)
    for _ in range(steps):
        with engine.replica.replaying():
            descriptors = engine.replica.forward(images[world.rank :: world.size])
            engine.replica.backward(descriptors, torch.ones_like(descriptors).cumsum(1), is_last=True)
            engine.replica.reduce()
        assert engine.update(1e-2) < float("inf")


def whole(engine):
    state = engine.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def save(world, folder):
    """The state that two steps of each engine lead to, saved; and the bytes that each rank wrote."""
    states = {}
    for name in ENGINES:
        engine = engine_named(name, world)
        train(engine, world, steps=2)
        writer = writer_to(folder / name, world, keep=1)
        writer.save(2, engine.state_dict(), {}, {})
        # The copy is made: what comes after changes nothing in it.
        states[name] = whole(engine)
        train(engine, world, steps=1)
        written = writer.wait()
        assert written.error is None
        path = folder / name / "checkpoints/step-00000002"
        states[name]["bytes"] = [(path / SHARD.format(rank + 1)).stat().st_size for rank in range(world.size)]
    return states


def restore(world, folder, name):
    """The state that an engine takes from each checkpoint, and what a step more makes of it."""
    states = {}
    for saved in ENGINES:
        engine = engine_named(name, world, seed=1)
        engine.load_state_dict(newest_on_disk(folder / saved, world).tensors())
        before = whole(engine)
        train(engine, world, steps=1)
        states[saved] = before, whole(engine)
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
@pytest.mark.parametrize("name", ENGINES)
def test_what_one_engine_saved_is_restored_into_another_on_another_number_of_ranks(saved, restored, name, into):
    state, _ = restored[into][name]
    expected = {key: value for key, value in saved[name].items() if key != "bytes"}
    assert any(key.endswith("power.exp_avg_sq") for key in state)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) and state[key].shape == expected[key].shape for key in state)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_go_on_alike_from_a_checkpoint(restored, name):
    (_, one), (_, other) = restored["ddp"][name], restored["fsdp"][name]
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-12)


def test_each_rank_writes_its_own_shards(saved):
    first, second = saved["fsdp"]["bytes"]
    assert first < 1.5 * second
