"""Trainings whose loss has parameters of its own."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from raising import raises
from ranks import on_ranks
from safetensors import safe_open
from small_trainings import are_same, losses, parameters, recipe, train
from stores import found_checkpoint
from torch.distributed.tensor import DTensor

import distap
from distap.ranking.losses.function import FunctionLoss
from distap.training.prepared import prepare
from distap.world import World

OPTIMIZER = {"learning_rate": 1e-3, "loss": {"factor": 100.0, "weight_decay": 1e-4}}
PML = "benchmarks.metric_learning:MetricLearning"  # a class that is none of ours
PROXIES = {"loss": "proxy_nca", "optimizer": OPTIMIZER, "steps": 4, "checkpoint": {"every": 2}}
# Gradient descent on a layer of 8 dimensions, so that no division amplifies rounding.
DESCENT = {"name": "momentum", "momentum": 0.0, "learning_rate": 1e-4, "loss": {"factor": 1000.0}}


def of_loss(run):
    return found_checkpoint(run).tensors("loss.")


@pytest.mark.parametrize(
    "loss", ["proxy_nca", {"name": PML, "function": "ProxyAnchorLoss"}], ids=str
)
def test_a_training_goes_on_with_its_proxies_bit_for_bit(tmp_path, training_shards, loss):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    checkpoint = Path("checkpoints") / "step-00000002"
    train(World(), whole, training_shards, **PROXIES | {"loss": loss})
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    train(World(), resumed, training_shards, **PROXIES | {"loss": loss})
    assert losses(resumed) == losses(whole)[2:]
    before = of_loss(whole / checkpoint)
    ours = of_loss(resumed)
    theirs = of_loss(whole)
    assert ours["loss.network.proxies"].shape == (12, 96)
    assert {name.rpartition(".")[2] for name in ours} == {
        "proxies",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert not torch.equal(before["loss.network.proxies"], ours["loss.network.proxies"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert are_same(whole, resumed)


def test_the_network_of_such_a_run_needs_no_loss(tmp_path, training_shards):
    train(World(), tmp_path, training_shards, **PROXIES, model__projection=8)
    assert not [name for name in parameters(tmp_path) if "prox" in name]
    assert distap.load(tmp_path, device="cpu").dimensions == 8


def train_by(world, run, shards, changes):
    train(world, run, shards, **PROXIES | changes)


@pytest.mark.slow
def test_proxies_do_not_depend_on_the_number_of_ranks_nor_on_the_engine(tmp_path, training_shards):
    settings = {
        "1": (1, {}),
        "2": (2, {"rank": {"mode": "central"}}),
        "3": (3, {}),
        "fsdp": (2, {"engine": "fsdp"}),
        "zero": (2, {"engine": {"name": "deepspeed", "stage": 3}}),
    }
    for name, (ranks, changes) in settings.items():
        on_ranks(
            ranks, train_by, tmp_path / name, training_shards, {**changes, "optimizer": DESCENT}
        )
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "1"), abs=2e-5), name
        proxies, expected = (of_loss(tmp_path / run)["loss.network.proxies"] for run in (name, "1"))
        torch.testing.assert_close(proxies, expected, rtol=1e-4, atol=1e-5)
    assert losses(tmp_path / "1")[-1] < losses(tmp_path / "1")[0]


# Of a loss with proxies, which ranks share out, and one with numbers that all ranks hold.
SHARED_OUT = {
    "loss": {"arc_face": 1.0, "sigmoid": 0.1},
    "optimizer": DESCENT | {"momentum": 0.9, "loss": {"factor": 100.0, "weight_decay": 0.1}},
    "rank": {"shard_classes": True},
    "steps": 6,
    "checkpoint": {"every": 2, "keep": 9},
}


def train_shared_out(world, run, shards):
    train(world, run, shards, **SHARED_OUT)


def test_a_training_goes_on_with_its_classes_on_other_numbers_of_ranks(tmp_path, training_shards):
    train(World(), tmp_path / "whole", training_shards, **SHARED_OUT)
    begun = tmp_path / "2"
    on_ranks(2, train_shared_out, begun, training_shards)
    for ranks, step in ((1, 2), (3, 4)):
        checkpoint = Path("checkpoints") / f"step-{step:08d}"
        resumed = tmp_path / str(ranks)
        shutil.copytree(begun / checkpoint, resumed / checkpoint)
        on_ranks(ranks, train_shared_out, resumed, training_shards)
        begun = resumed
    expected = of_loss(tmp_path / "whole")
    assert [tensor.shape for tensor in expected.values()].count((12, 96)) == 2  # with momentum
    for ranks, steps in ((2, 6), (1, 4), (3, 2)):
        run = tmp_path / str(ranks)
        assert losses(run) == pytest.approx(losses(tmp_path / "whole")[-steps:], abs=2e-5)
        torch.testing.assert_close(of_loss(run), expected, rtol=1e-4, atol=1e-5)
        # Each rank has written its part.
        files = (run / "checkpoints/step-00000006").glob("*.safetensors")
        held = [name for path in files for name in safe_open(path, "pt").keys()]  # noqa: SIM118
        assert held.count("loss.network.0.proxies") == ranks


def learned_by(world, run, shards, shard_classes):
    settings = recipe(run, shards, loss="proxy_nca", rank={"shard_classes": shard_classes})
    proxies = prepare(settings, world).step.stages.loss.learned["proxies"]
    return isinstance(proxies, DTensor)


def all_learned(world, run, shards):
    held = [learned_by(world, run, shards, setting) for setting in (False, True, "auto")]
    with patch("distap.training.build.MOST_WHOLE_CLASSES", 11):
        return [*held, learned_by(world, run, shards, "auto")]


def test_a_training_shares_out_proxies_of_many_classes_unless_it_is_told(tmp_path, training_shards):
    for answer in on_ranks(2, all_learned, tmp_path, training_shards):
        assert answer == [False, True, False, True]  # of 12 classes


def test_a_number_of_classes_that_is_not_the_data_sets_is_refused(tmp_path, training_shards):
    with raises("loss.wrong_setting", "5", "12"):
        train(
            World(),
            tmp_path,
            training_shards,
            **PROXIES | {"loss": {"name": "proxy_nca", "classes": 5}},
        )


class Classifier(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.weights = torch.nn.Parameter(
            torch.randn(classes, 96, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, descriptors, labels):
        return torch.nn.functional.cross_entropy(descriptors @ self.weights.t(), labels)


def test_a_loss_in_python_of_another_size_cannot_go_on(tmp_path, training_shards):
    for steps, classes in ((1, 12), (2, 12)):
        train(
            World(), tmp_path, training_shards, steps=steps, loss=FunctionLoss(Classifier(classes))
        )
    with raises("run.other_network"):
        train(World(), tmp_path, training_shards, steps=3, loss=FunctionLoss(Classifier(14)))
