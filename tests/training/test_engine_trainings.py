"""Whole trainings under each engine: evaluation, checkpoints, going on under another engine."""

import logging
import signal
import threading

import pytest
import torch
from ranks import on_ranks
from small_trainings import losses, parameters, recipe

from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.prepared import prepare

ENGINES = [
    {"engine": "ddp"},
    {"engine": "fsdp", "replay": {"size": 4, "keep": 2}, "step": {"fold_batchnorm": True}},
    {"engine": {"name": "fsdp", "reshard": "pass"}, "step": {"fold_batchnorm": True}},
    {"engine": {"name": "fsdp", "unit": "blocks", "within": "host"}, "ema": 0.9},
    *({"engine": {"name": "deepspeed", "stage": stage}} for stage in (1, 2, 3)),
]
SETTINGS = {
    "steps": len(ENGINES),
    "checkpoint": {"every": 1},
    "evaluation": {"every": 3, "batch_size": 8},
    "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0, "eps": 1e-2},
    "model": {
        "backbone": "test_resnet",
        "weights": {"name": "random"},
        "arguments": {"drop_rate": 0.1},
    },
    "sampling": {"name": "random", "batch_size": 25},
}


def settings(shards, **changes):
    data = {"train": str(shards[0]), "validation": str(shards[1]), "image_size": 32, "workers": 0}
    return {**SETTINGS, "data": data, **changes}


def train_until(world, run, shards, steps, **changes):
    """Train to a step, of as many as the schedule has, where a signal asks to stop."""
    trainer = Trainer(prepare(recipe(run, shards, **settings(shards, **changes)), world), world)
    asked = threading.Event()
    shares = trainer.images.shares
    logging.getLogger("distap").addFilter(
        lambda record: "stopping" not in str(record.msg) or not asked.set()
    )

    def stopping(wanted, total):
        for share in shares(wanted, total):
            if share.step + 1 == steps < total:
                signal.raise_signal(signal.SIGTERM)
                assert asked.wait(60)  # for the thread that hears signals to say so
            yield share

    trainer.images.shares = stopping
    trainer.train()


def each_engine_takes_a_step(world, folder, shards):
    train_until(world, folder / "ddp", shards, len(ENGINES))
    for number, changes in enumerate(ENGINES, 1):
        train_until(world, folder / "all", shards, number, **changes)


def with_less_precision(world, folder, shards):
    train_until(world, folder / "float32", shards, 3, evaluation={"every": 0})
    rounded = {"name": "fsdp", "gather": "bf16", "reshard": "pass"}
    for name in ("ddp", "fsdp", "deepspeed", "bf16 gathers"):
        run = folder / name
        evaluation = {"every": 0 if name == "ddp" else 3, "precision": "bf16", "batch_size": 8}
        engine = rounded if name == "bf16 gathers" else name
        changes = {"precision": "bf16", "evaluation": evaluation}
        train_until(world, run, shards, 1, engine=engine, **changes)
        train_until(world, run, shards, 3, engine=engine, **changes)


def train_all(world, folder, shards):
    """Once for both tests, since DeepSpeed's ranks start slowly."""
    each_engine_takes_a_step(world, folder / "steps", shards)
    with_less_precision(world, folder / "precisions", shards)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, training_shards):
    folder = tmp_path_factory.mktemp("engines")
    on_ranks(2, train_all, folder, training_shards)
    return folder


@pytest.mark.slow
def test_every_engine_goes_on_where_another_one_stopped_as_if_it_had_been_one_training(folder):
    runs = folder / "steps"
    assert losses(runs / "all") == pytest.approx(losses(runs / "ddp"), abs=1e-4)
    assert len(losses(runs / "all")) == len(ENGINES)
    steps = [entry for entry in read_run_log(runs / "all") if "loss" in entry]
    assert all(entry["seconds"]["reduce"] > 0 for entry in steps)
    item, other = (parameters(runs / run) for run in ("ddp", "all"))
    assert item.keys() == other.keys()
    for name, tensor in item.items():
        assert (other[name] - tensor).double().norm() <= 1e-4 * tensor.double().norm() + 1e-5, name


@pytest.mark.slow
def test_every_engine_trains_in_half_precision_and_goes_on(folder):
    runs = [run for run in (folder / "precisions").iterdir() if run.name != "float32"]
    assert len(runs) == 4
    for run in runs:
        assert losses(run) == pytest.approx(losses(folder / "precisions/float32"), abs=0.03), (
            run.name
        )
        assert all(
            tensor.dtype in (torch.float32, torch.int64) for tensor in parameters(run).values()
        )
