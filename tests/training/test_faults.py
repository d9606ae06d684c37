"""What a run does when something goes wrong: each test injects one fault into a real run of several
ranks.
"""

import os
import re
import shutil
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from faults import recorded_batches
from launching import started
from small_trainings import are_same, losses, parameters
from stores import list_checkpoints
from trainings import STEPS, Run

from distap.config.reading import load_recipe
from distap.errors import FAILED, RESTART
from distap.telemetry.runlog import read_run_log
from distap.training.build import network_of
from distap.world import World

pytestmark = pytest.mark.slow


def distance(first: Run, second: Run) -> float:
    """How far apart two runs ended, as a share of the way from the start."""
    ours = parameters(first.folder)
    theirs = parameters(second.folder)
    start = network_of(load_recipe(first.config), World()).state_dict()
    apart, way = (
        torch.cat(
            [(ours[f"network.{name}"] - other).double().flatten() for name, other in remaining]
        )
        for remaining in ([(name, theirs[f"network.{name}"]) for name in start], start.items())
    )
    return float(apart.norm() / way.norm())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, training_shards) -> Run:
    """The run on two ranks that nothing happens to."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), training_shards)
    status, output = run.go(2)
    assert status == 0, output
    return run


@pytest.mark.parametrize(
    "place",
    # for the other stages see below
    ["step=0 stage=start", "step=5 stage=rank", "step=5 stage=checkpoint"],
)
def test_a_killed_rank_brings_the_job_back_from_the_newest_checkpoint(
    tmp_path, training_shards, undisturbed, place
):
    run = Run(tmp_path, training_shards)
    status, output = run.go(2, f"SIGKILL rank=1 {place}", restarts=1)
    assert status == 0, output
    assert "stage=start" in place or re.search(r"going on from .*step-0000000[24]", output)
    assert run.batches() == undisturbed.batches()
    assert losses(run.folder) == losses(undisturbed.folder)
    assert are_same(run.folder, undisturbed.folder)


def test_from_4_to_2_to_3_ranks_the_batches_and_the_parameters_are_those_of_one_run(
    tmp_path, training_shards, undisturbed
):
    generator = np.random.default_rng(0)
    run = Run(tmp_path, training_shards)
    first = int(generator.integers(3, 5))
    second = int(generator.integers(5, 7))
    status, output = run.go(4, f"SIGKILL rank=2 step={first} stage=replay")
    assert status == FAILED, output
    status, output = run.go(2, f"SIGKILL rank=0 step={second} stage=describe")
    assert status == FAILED, output
    assert "going on from" in output
    status, output = run.go(3)
    assert status == 0, output
    assert run.batches() == undisturbed.batches()
    assert losses(run.folder) == pytest.approx(losses(undisturbed.folder), abs=1e-6)
    assert distance(run, undisturbed) < 1e-3


def test_one_rank_that_is_asked_to_stop_stops_all_after_the_same_step(
    tmp_path, training_shards, undisturbed
):
    run = Run(tmp_path, training_shards, checkpoint={"every": 100})
    status, output = run.go(2, "SIGTERM rank=1 step=3 stage=rank", restarts=3)
    assert status == RESTART, output
    assert "SIGTERM: stopping after this step, with a checkpoint" in output
    assert f"stopped after step 4 of {STEPS}, with a checkpoint" in output
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")] == ["step-00000004"]
    assert set(recorded_batches(run.records)) == {0, 1, 2, 3}
    status, output = run.go(2)
    assert status == 0, output
    assert run.batches() == undisturbed.batches()
    assert are_same(run.folder, undisturbed.folder)


def test_a_rank_killed_while_the_last_checkpoint_is_written_or_while_evaluating_is_no_mistake(
    tmp_path, training_shards
):
    run = Run(
        tmp_path,
        training_shards,
        data__validation=str(training_shards[1]),
        evaluation={"every": STEPS, "at_start": False},
    )
    status, output = run.go(2, f"SIGKILL rank=1 step={STEPS - 1} stage=evaluation", restarts=1)
    assert status == 0, output
    assert len([entry for entry in read_run_log(run.folder) if "validation" in entry]) == 1
    shutil.rmtree(run.folder)
    status, output = run.go(2, f"SIGKILL rank=1 step={STEPS - 1} stage=checkpoint")
    assert status == FAILED, output
    assert re.search(
        r"ERROR .* rank 0: writing of the checkpoint \(.*\) failed: rank 1 \(\S+, pid \d+\)"
        r" has not",
        output,
    )


def test_before_the_first_step_there_is_nothing_to_save_and_the_status_is_the_same(
    tmp_path, training_shards
):
    run = Run(tmp_path, training_shards)
    with run.started(2, "stand-still rank=1 step=0 stage=start") as job:
        job.wait_until(lambda: len(job.left()) >= 3)
        job.process.terminate()
        assert job.status() == RESTART, job.said


def test_one_of_two_launchers_that_is_asked_to_stop_stops_both(tmp_path, training_shards):
    run = Run(tmp_path, training_shards, steps=10_000, checkpoint={"every": 10_000})
    options = "--nnodes=2 --nproc-per-node=1 --master-port=29471 --node-rank="
    first, second = (run.launch(f"{options}{number}") for number in range(2))
    with (
        started(first, tmp_path, **run.environment) as item,
        started(second, tmp_path, **run.environment) as other,
    ):
        item.wait_until(lambda: run.has_done(1))
        item.process.terminate()
        assert item.status() == other.status() == RESTART, item.said + other.said
        stopped = int(re.search(r"stopped after step (\d+) of 10000", item.said + other.said)[1])
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")] == [
        f"step-{stopped:08d}"
    ]


def test_a_second_request_stops_at_once(tmp_path, training_shards):
    run = Run(tmp_path, training_shards)
    # The rank stands still in the step, so that the first request cannot be met.
    with run.started(
        2, "SIGTERM rank=1 step=3 stage=rank; stand-still rank=1 step=3 stage=rank"
    ) as job:
        job.wait_until(lambda: "stopping after this step" in job.said)
        rank = job.pid(1)

        def asked_again() -> bool:
            with suppress(ProcessLookupError):  # it may have left since it said so
                # within a second of the first, it is the same request
                os.kill(rank, signal.SIGTERM)
            return "SIGTERM again" in job.said

        job.wait_until(asked_again)
        assert job.status() == FAILED
        assert "SIGTERM again: stopping at once" in job.said
    assert not (run.folder / "checkpoints" / "step-00000004").exists()


def test_a_killed_launcher_leaves_no_orphan(tmp_path, training_shards):
    run = Run(tmp_path, training_shards, steps=10_000, data__workers=1)
    with run.started(2) as job:
        job.wait_until(lambda: run.has_done(1))
        assert len(job.left()) >= 5  # launcher, ranks and their loader workers
        job.process.kill()
        job.status()
        job.wait_until_none_is_left()


def test_the_grace_time_is_a_hard_limit(tmp_path, training_shards):
    run = Run(tmp_path, training_shards, stop={"grace_seconds": 2})
    status, output = run.go(
        2, "SIGTERM rank=1 step=3 stage=rank; stand-still rank=1 step=3 stage=rank"
    )
    assert "the grace time of 2 s (stop.grace_seconds) is over" in output
    # the other rank lost its peer, or was asked in time by the launcher
    assert status in (FAILED, RESTART), output
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")] == ["step-00000002"]
