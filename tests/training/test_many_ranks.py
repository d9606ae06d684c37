"""What two ranks cannot show: 12 to 16 of them that start, train, save, go on as fewer, and lose one."""

import pytest
from ranks import on_ranks
from small_trainings import DESCENT, losses, train
from stores import list_checkpoints

pytestmark = pytest.mark.slow

CHANGES = {"sampling": {"name": "random", "batch_size": 50}, "optimizer": DESCENT, "checkpoint": {"every": 2}}


def train_on_ranks(world, run, shards, steps):
    train(world, run, shards, steps=steps, **CHANGES)


def test_a_training_on_16_ranks_goes_on_with_12_as_one_rank_would(tmp_path, training_shards):
    for run, ranks in (("one", (1, 1)), ("many", (16, 12))):
        for steps, size in zip((2, 4), ranks, strict=True):  # the learning rate depends on the steps
            on_ranks(size, train_on_ranks, tmp_path / run, training_shards, steps)
            assert len(losses(tmp_path / run)) == steps
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=2e-5)
    kept = [folder.name for folder in list_checkpoints(tmp_path / "many" / "checkpoints")]
    assert kept == ["step-00000002", "step-00000004"]
