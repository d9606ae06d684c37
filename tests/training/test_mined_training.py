"""Batches of classes that lie near each other by descriptors of the training itself."""

import os
import shutil
import signal
import sys

import numpy as np
import pytest
from ranks import on_ranks
from small_trainings import DESCENT, are_same, losses, recipe, train

from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.data.plan import Classes, Plan
from distap.data.sampling import MinedSampling, PByKSampling
from distap.data.shards.index import load_index
from distap.errors import RESTART, DistapError
from distap.evaluation.describing import describing_of
from distap.evaluation.sets import open_set
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import network_of
from distap.training.prepared import prepare
from distap.world import World

MINED = {"name": "mined", "classes": 4, "images": 2, "near": 2, "every": 2}
SETTINGS = {
    "sampling": MINED,
    "steps": 5,
    "optimizer": DESCENT,
    "checkpoint": {"every": 3, "keep": 9},
}


RUNS = ("run", "whole")


def train_on_ranks(world, run, shards):
    train(world, run, shards, **SETTINGS)


def test_each_class_brings_those_that_are_nearest_to_it():
    classes, sampling = (
        Classes(np.repeat(np.arange(12), 3)),
        MinedSampling(classes=6, images=2, near=3),
    )
    pairs = np.arange(12) // 3 * 3  # four groups of three, each nearest to the others of its own
    groups = enumerate((pairs[:, None] + np.arange(3)).tolist())
    nearest = np.array(
        [[own, *(neighbour for neighbour in group if neighbour != own)] for own, group in groups]
    )
    near = Classes(classes.labels, nearest=nearest)
    plan = Plan(near, sampling, 0)
    batches = [plan.batch(step) for step in range(40)]
    for batch in batches:
        taken = classes.labels[batch]
        assert len(set(batch.tolist())) == 12 and np.bincount(taken).max() == 2
        # two whole groups
        assert sorted(np.bincount(np.unique(taken) // 3).tolist())[-2:] == [3, 3]
    assert {label for batch in batches for label in classes.labels[batch].tolist()} == set(
        range(12)
    )
    assert np.array_equal(plan.batch(3), Plan(near, sampling, 0).batch(3))
    before = Plan(classes, sampling, 0).batch(3)
    assert np.array_equal(before, Plan(classes, PByKSampling(classes=6, images=2), 0).batch(3))


def test_it_mines_by_its_own_descriptors_resumes_between_and_is_the_same_on_two_ranks(
    tmp_path, training_shards
):
    whole = tmp_path / "1"
    resumed = tmp_path / "resumed"
    for ranks in (1, 2):
        on_ranks(ranks, train_on_ranks, tmp_path / str(ranks), training_shards)
    assert (
        losses(tmp_path / "2") == pytest.approx(losses(whole), abs=1e-5) and len(losses(whole)) == 5
    )
    checkpoint = f"{CHECKPOINTS_FOLDER}/step-00000003"  # the classes were mined after step 2
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    train(World(), resumed, training_shards, **SETTINGS)
    assert losses(resumed) == losses(whole)[3:]
    assert are_same(whole, resumed)


def test_the_table_holds_the_classes_of_the_nearest_means(tmp_path, training_shards):
    settings = recipe(tmp_path, training_shards, **SETTINGS | {"steps": 1})
    trainer = Trainer(prepare(settings, World()), World())
    trainer.train()
    nearest = trainer.images.plan.classes.nearest
    index = load_index(training_shards[0])
    network = network_of(settings, World())
    described = open_set(str(training_shards[0])).describe(
        describing_of(settings, network, World())
    )
    means = np.stack(
        [described.queries[index.label == label].mean(0) for label in range(len(index.class_name))]
    )
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    usable = index.classes.with_pairs
    for label in usable:
        remaining = [other for other in usable if other != label]
        assert nearest[label].tolist() == [
            label,
            max(remaining, key=lambda other: float(means[label] @ means[other])),
        ]


def test_a_request_to_stop_while_it_mines_ends_with_one_checkpoint(tmp_path, training_shards):
    judged = {"data__validation": str(training_shards[1]), "evaluation": {"every": 2}}
    changes = {**SETTINGS, **judged, "data__image_sizes": {0: 16, 0.5: 32}}
    trainer = Trainer(
        prepare(recipe(tmp_path / "run", training_shards, **changes), World()), World()
    )
    renew = trainer.state.nearest.renew

    def asked_to_stop(describing):
        if trainer.done:
            os.kill(os.getpid(), signal.SIGTERM)
        renew(describing)

    trainer.state.nearest.renew = asked_to_stop
    assert trainer.train() == RESTART
    assert [path.name for path in (tmp_path / "run" / CHECKPOINTS_FOLDER).iterdir()] == [
        "step-00000002"
    ]
    train(World(), tmp_path / "run", training_shards, **changes)
    train(World(), tmp_path / "whole", training_shards, **changes)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    evaluated = [
        [entry["step"] for entry in read_run_log(tmp_path / run) if "validation" in entry]
        for run in RUNS
    ]
    assert evaluated[0] == evaluated[1] == [0, 2, 4, 5]


def test_what_cannot_mine_is_refused_before_the_first_step(tmp_path, training_shards, monkeypatch):
    model = {"backbone": "test_resnet", "weights": {"name": "random"}, "projection": 8}
    with pytest.raises(DistapError, match="which describes images again"):
        recipe(tmp_path, ("described:somewhere",), **SETTINGS, model=model)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DistapError, match="needs Faiss"):
        Trainer(prepare(recipe(tmp_path, training_shards, **SETTINGS), World()), World())
