"""Begin a projection as a whitening of training images."""

import shutil

import numpy as np
import torch
from raising import raises
from ranks import on_ranks
from small_trainings import are_same, recipe, train

from distap.stopwatch import Stopwatch
from distap.trainer import Trainer
from distap.training.build import images_of
from distap.training.prepared import prepare
from distap.world import World

MODEL = {"backbone": "test_resnet", "weights": "random", "projection": 8, "whitening": 10_000}


def begun(world, run, shards, **changes):
    """The network before its first step."""
    return Trainer(prepare(recipe(run, shards, model=MODEL, **changes), world), world).network


def head_on_a_rank(world, run, shards):
    return begun(world, run, shards).head.state_dict()


def test_the_projection_whitens_the_images_of_the_first_steps(tmp_path, training_shards):
    network = begun(World(), tmp_path, training_shards)
    settings = recipe(tmp_path, training_shards)
    images = images_of(settings, World(), Stopwatch())
    seen = [
        share.images(slice(0, 25)).clone()
        for share in images.shares(range(-(-len(images.index) // 25)))
    ]
    with torch.no_grad():
        pooled = network.eval().pooled(torch.cat(seen)).double()
        projected = network.head(pooled.float()).double()
    variances = np.linalg.eigvalsh(np.cov(pooled.numpy().T, bias=True))[::-1][:8]
    assert projected.mean(0).abs().max() < 1e-3
    # Revaud et al.'s PCA divides by the square root of the deviation, so deviations of
    # sqrt(deviation) are left.
    np.testing.assert_allclose(
        np.cov(projected.numpy().T, bias=True), np.diag(variances**0.5), atol=2e-3
    )


def test_all_ranks_begin_with_the_same_projection(tmp_path, training_shards):
    alone = head_on_a_rank(World(), tmp_path, training_shards)
    for state in on_ranks(2, head_on_a_rank, tmp_path, training_shards):
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, alone[name], atol=1e-4, rtol=1e-3)


def test_a_run_that_goes_on_keeps_what_it_has_learned(tmp_path, training_shards):
    settings = {
        "model": MODEL,
        "checkpoint": {"every": 1},
        "steps": 2,
        "data__pixels": {"memory_bytes": 0},
    }
    train(World(), tmp_path / "whole", training_shards, **settings)
    first = "checkpoints/step-00000001"
    shutil.copytree(tmp_path / "whole" / first, tmp_path / "cut" / first)
    train(World(), tmp_path / "cut", training_shards, **settings)
    assert are_same(tmp_path / "cut", tmp_path / "whole")


def test_too_few_images_for_so_many_dimensions_are_named(tmp_path, training_shards):
    model = {**MODEL, "projection": 500, "whitening": 30}
    with raises("descriptors.too_few_to_whiten", "projection", "50", "96", "49", "500"):
        prepare(recipe(tmp_path, training_shards, model=model), World(), planned_ranks=1)
