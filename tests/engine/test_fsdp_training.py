"""A whole training on FSDP2, from the checkpoint of another engine and on to one that any of them can use."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from small_trainings import losses, recipe

from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.world import World

pytestmark = pytest.mark.slow
HALF = Path("checkpoints") / "step-00000002"
WAYS = {
    "at once": {"engine": "fsdp", "replay": {"size": 4, "keep": 2}, "describe": {"fold_batchnorm": True}},
    "freed each time": {"engine": {"name": "fsdp", "reshard": True}},
}


def train_with_each(world, folder, shards):
    """Four steps with DDP, and the last two of them again."""
    common = {"steps": 4, "checkpoint": {"every": 2}, "evaluation": {"every": 2}}
    common |= {"data__validation": str(shards[1])}
    Trainer(recipe(folder / "ddp", shards, **common), world).train()
    for name, changes in WAYS.items():
        if world.rank == 0:
            shutil.copytree(folder / "ddp" / HALF, folder / name / HALF)
        world.barrier()
        Trainer(recipe(folder / name, shards, **common, **changes), world).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, training_shards):
    folder = tmp_path_factory.mktemp("runs")
    on_ranks(2, train_with_each, folder, training_shards)
    return folder


def validations(run):
    return [entry["validation"] for entry in read_run_log(run) if "validation" in entry]


@pytest.mark.parametrize("name", WAYS)
def test_a_training_goes_on_with_fsdp_as_it_would_have_with_ddp(runs, name):
    assert losses(runs / name) == pytest.approx(losses(runs / "ddp")[2:], abs=1e-4)
    assert validations(runs / name)[-1] == pytest.approx(validations(runs / "ddp")[-1], abs=1e-2)


@pytest.mark.parametrize("name", WAYS)
def test_the_network_of_an_fsdp_training_is_one_that_needs_no_fsdp(runs, name):
    _, network = trained_network(runs / name, World())
    _, other = trained_network(runs / "ddp", World())
    for mine, its in zip(network.parameters(), other.parameters(), strict=True):
        # Adam makes of rounding what it makes of a gradient: no step is longer than the rate.
        torch.testing.assert_close(mine, its, rtol=0, atol=2e-3)
