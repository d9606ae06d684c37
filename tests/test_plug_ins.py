"""One part of every kind from outside the package, by its class and by a line in the registry."""

import json

import pytest
import yaml
from raising import raises
from ranks import on_ranks
from small_trainings import losses, recipe

from distap.cli.train import check_training
from distap.config.reading import load_recipe
from distap.registry import REGISTRY
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

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
        "model": {
            "backbone": {"name": names["backbone"], "channels": 6},
            "pooling": names["pooling"],
        },
        "data__reading": names["source"],
        "data__augmentation": {"name": names["augmentation"]},
        "optimizer": {"name": names["optimizer"], "learning_rate": 1e-3},
        "schedule": {"name": names["schedule"], "every": 1},
        "loggers": [{"name": names["logger"], "file": str(file)}],
    }


def train_two_steps(world, folder, shards):
    by_class = {kind: f"plug_ins:{name}" for kind, name in OURS.items()}
    by_line = {kind: f"my_{kind}" for kind in OURS}
    for kind, name in by_class.items():
        REGISTRY[kind][by_line[kind]] = name
    for way, names in (("class", by_class), ("line", by_line)):
        read = recipe(folder / way, shards, **settings(names, folder / f"{way}.jsonl"))
        assert load_recipe(read.model_dump(mode="json"), where="what a checkpoint keeps") == read
        assert Trainer(prepare(read, world), world).train() == 0


def test_parts_of_every_kind_from_outside_train_on_two_ranks(tmp_path, training_shards):
    on_ranks(2, train_two_steps, tmp_path, training_shards)
    for way in ("class", "line"):
        curve = losses(tmp_path / way)
        assert len(curve) == 2 and all(0 < loss < 2 for loss in curve)
        *steps, last = map(json.loads, (tmp_path / f"{way}.jsonl").read_text().splitlines())
        assert [line["loss"] for line in steps if "loss" in line] == curve
        assert last == {"failed": False}


RANDOM = {"name": "random", "batch_size": 14}
OF_LISTS = {"sampling": "InGivenOrder", "loss": "WithLists", "data__augmentation": "CentreOfList"}


def written(folder, shards, sampling=RANDOM, **changes):
    file = folder / "recipe.yaml"
    file.write_text(
        yaml.safe_dump(
            recipe(
                folder / "run",
                shards,
                steps=2,
                sampling=sampling,
                **changes,
            ).model_dump(mode="json")
        )
    )
    return file


def test_parts_whose_fields_are_lists_and_mappings_train_and_evaluate(tmp_path, training_shards):
    plug_ins = {key: f"plug_ins:{name}" for key, name in OF_LISTS.items()}
    file = written(
        tmp_path,
        training_shards,
        **plug_ins,
        data__validation=str(training_shards[0]),
        data__unseen_classes=False,
        evaluation={"every": 1},
    )
    check_training(file, [], 2)
    assert Trainer(prepare(load_recipe(file, []), World()), World()).train() == 0
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("key", "name", "code", "names"),
    [
        (
            "sampling",
            "FailingSampling",
            "recipe.failing_part",
            ["sampling", "FailingSampling", "KeyError", "no such shelf"],
        ),
        ("sampling", "Repeating", "sampling.wrong_batch", ["sampling"]),
        (
            "data__augmentation",
            "FailingAugmentation",
            "recipe.failing_part",
            ["data.augmentation", "FailingAugmentation", "ZeroDivisionError"],
        ),
        ("data__augmentation", "FloatPixels", "data.augmentation_failed", ["float32", "uint8"]),
        ("data__augmentation", "DrawsElsewhere", "data.augmentation_differs", ["DrawsElsewhere"]),
        ("sampling", "ForgetsTheSeed", "sampling.batch_differs", ["ForgetsTheSeed"]),
        ("sampling", "NoPairs", "sampling.no_positives", []),
        ("loss", "CountsAlone", "loss.no_gradient", ["CountsAlone"]),
        ("loss", "FailingLoss", "recipe.failing_part", ["loss", "FailingLoss", "IndexError"]),
    ],
)
def test_a_dry_run_finds_what_fails_or_goes_wrong_in_a_part_from_outside(
    tmp_path, training_shards, key, name, code, names
):
    file = written(tmp_path, training_shards, **{key: f"plug_ins:{name}"})
    with raises(code, *names):
        check_training(file, [], 2)
