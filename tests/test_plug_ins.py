"""One part of every kind from outside the package, by its class and by a line in the registry."""

import json

import pytest
from ranks import on_ranks
from small_trainings import losses, recipe

from distap.config.reading import recipe_from
from distap.registry import REGISTRY
from distap.trainer import Trainer

OURS = {
    "loss": "HardestNegative",
    "sampling": "InOrder",
    "backbone": "TwoConvolutions",
    "pooling": "MaxPooling",
    "source": "OwnIndex",
    "augmentation": "CentreOnly",
    "optimizer": "SignDescent",
    "schedule": "Halving",
    "logger": "LinesInFile",
}


def settings(names, file):
    return {
        "steps": 2,
        "loss": {"name": names["loss"], "margin": 0.2},
        "sampling": {"name": names["sampling"], "batch_size": 14},
        "model": {"backbone": {"name": names["backbone"], "channels": 6}, "pooling": names["pooling"]},
        "data__reading": names["source"],
        "data__augmentation": {"name": names["augmentation"]},
        "optimizer": {"name": names["optimizer"], "learning_rate": 1e-3},
        "schedule": {"name": names["schedule"], "every": 1},
        "loggers": {names["logger"]: {"file": str(file)}},
    }


def train_two_steps(world, run, shards, names, file, is_registered):
    if is_registered:
        for kind, name in OURS.items():
            REGISTRY[kind][names[kind]] = f"plug_ins:{name}"
    read = recipe(run, shards, **settings(names, file))
    assert recipe_from(read.model_dump(mode="json"), "what a checkpoint keeps") == read
    assert Trainer(read, world).train() == 0
    return losses(run)


@pytest.mark.parametrize("is_registered", [False, True])
def test_parts_of_every_kind_from_outside_train_on_two_ranks(tmp_path, training_shards, is_registered):
    names = {kind: f"my_{kind}" if is_registered else f"plug_ins:{name}" for kind, name in OURS.items()}
    file = tmp_path / "lines.jsonl"
    found, _ = on_ranks(2, train_two_steps, tmp_path / "run", training_shards, names, file, is_registered)
    assert len(found) == 2 and all(0 < loss < 2 for loss in found)
    *steps, last = map(json.loads, file.read_text().splitlines())
    assert [line["loss"] for line in steps if "loss" in line] == found
    assert last == {"failed": False}
