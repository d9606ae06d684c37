import shutil
from pathlib import Path

import pytest
import torch
from faults import record, recorded_batches
from ranks import on_ranks
from small_trainings import DESCENT, losses, parameters, recipe
from streamed import SPOILT, write_by_webdataset

from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.trainer import Trainer
from distap.training.learner import TrainingStep
from distap.world import World


def test_that_validation_classes_are_unseen_is_checked_where_there_is_an_index(tmp_path, training_shards, caplog):
    changes = {
        "data__reading": "streamed",
        "data__validation": str(training_shards[1]),
        "sampling": {"name": "random", "batch_size": 8},
    }
    with pytest.raises(DistapError, match="class"):
        both = (training_shards[1], training_shards[1])
        Trainer(recipe(tmp_path / "run", both, **changes), World())
    without = tmp_path / "shards"
    shutil.copytree(training_shards[1], without)
    (without / "index.npz").unlink()
    Trainer(recipe(tmp_path / "run", (without,), **changes), World())
    told = f"{without} has no index, so nothing checks whether it shares classes with {training_shards[1]}"
    assert told in caplog.text


def train(world, folder, name):
    """Train by the recipe NAME.yaml, with a record of the batches."""
    unrecorded = TrainingStep.__call__
    record(folder / f"{name}-records")
    Trainer(load_recipe(folder / f"{name}.yaml"), world).train()
    TrainingStep.__call__ = unrecorded


def go_on(folder, name):
    """Begin a run with what the whole one had after two steps."""
    checkpoint = Path("checkpoints") / "step-00000002"
    shutil.copytree(folder / "whole" / checkpoint, folder / name / checkpoint)


def train_twice(world, folder):
    train(world, folder, "whole")
    if world.rank == 0:
        go_on(folder, "two")
    world.barrier()
    train(world, folder, "two")
    return world.gather_values([f"rank {world.rank}", "é" * world.rank])


@pytest.mark.slow
def test_shards_of_others_train_without_an_index_and_a_run_goes_on_with_the_same_batches(tmp_path):
    shards = write_by_webdataset(tmp_path / "shards", spoil=SPOILT.items())
    for name in ("whole", "two", "one"):
        (tmp_path / f"{name}-records").mkdir()
        settings = recipe(
            tmp_path / name,
            (shards,),
            steps=4,
            data__reading={"name": "streamed", "shuffle": 5},
            data__workers=1,
            sampling={"name": "random", "batch_size": 16},
            checkpoint={"every": 2, "keep": 9},
            optimizer=DESCENT,
        )
        (tmp_path / f"{name}.yaml").write_text(settings.model_dump_json())
    assert on_ranks(2, train_twice, tmp_path) == [[["rank 0", ""], ["rank 1", "é"]]] * 2
    go_on(tmp_path, "one")
    train(World(), tmp_path, "one")

    whole, two, one = (recorded_batches(tmp_path / f"{name}-records") for name in ("whole", "two", "one"))
    assert [len(whole[step]) for step in range(4)] == [1] * 4
    assert two == {step: whole[step] for step in (2, 3)}
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")[2:]
    assert [len(one[step]) for step in (2, 3)] == [1, 1]  # of other images: one rank's stream has all shards
    ours, theirs = parameters(tmp_path / "two"), parameters(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
