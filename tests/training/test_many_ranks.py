"""What two ranks cannot show: 16 to 32 of them that start, train, save, go on as fewer, and lose one."""

import os
import re
import signal

import pytest
from ranks import RankFailedError, on_ranks
from small_trainings import DESCENT, losses, train
from stores import list_checkpoints

pytestmark = pytest.mark.slow

CHANGES = {"sampling": {"name": "random", "batch_size": 50}, "optimizer": DESCENT, "checkpoint": {"every": 2}}
LOST = 11


def train_on_ranks(world, run, shards, steps):
    train(world, run, shards, steps=steps, **CHANGES)


def test_a_training_on_32_ranks_goes_on_with_24_as_one_rank_would(tmp_path, training_shards):
    for run, ranks in (("one", (1, 1)), ("many", (32, 24))):
        for steps, size in zip((2, 4), ranks, strict=True):  # the learning rate depends on the steps
            on_ranks(size, train_on_ranks, tmp_path / run, training_shards, steps)
            assert len(losses(tmp_path / run)) == steps
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=2e-5)
    kept = [folder.name for folder in list_checkpoints(tmp_path / "many" / "checkpoints")]
    assert kept == ["step-00000002", "step-00000004"]


def train_and_lose_one(world, run, shards):
    note = world.watchdog.note

    def note_or_die(activity):
        if world.rank == LOST and activity == "replay of step 2":
            os.kill(os.getpid(), signal.SIGKILL)
        note(activity)

    world.watchdog.note = note_or_die
    train(world, run, shards, steps=4, **CHANGES)


def test_16_ranks_that_lose_one_name_no_other(tmp_path, training_shards):
    with pytest.raises(RankFailedError) as failed:
        on_ranks(16, train_and_lose_one, tmp_path, training_shards)
    verdicts = re.findall(r"CollectiveError: rank \d+: .* failed: (rank \d+) \(", str(failed.value))
    assert set(verdicts) == {f"rank {LOST}"}, failed.value
    # A rank that hangs in gloo ends as the lost one did: without a word.
    assert len(verdicts) + str(failed.value).count("a rank ended without an answer") == 16, failed.value
