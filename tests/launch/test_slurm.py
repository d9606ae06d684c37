"""The batch script on a real Slurm."""

import os
import sys
from pathlib import Path

import pytest
from launching import OF_JOBS, ROOT
from slurm import one_node
from trainings import Run

from distap.errors import MISTAKE

SCRIPT = str(ROOT / "launch" / "slurm" / "train.sbatch")


def interpreter(folder: Path, line: str) -> str:
    """An interpreter that runs this line of shell instead of the launcher."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
def test_a_job_that_is_preempted_is_queued_again_and_goes_on_and_a_mistake_is_not(tmp_path, training_shards):
    run = Run(tmp_path / "job", training_shards, steps=100_000)
    environment = OF_JOBS | {"PYTHON": sys.executable}
    with one_node(tmp_path) as slurm:
        number, log = slurm.submit(SCRIPT, str(run.config), **environment)
        slurm.wait_until(lambda: log.exists() and "step 3/" in log.read_text(), log)
        slurm.call("scancel", "--signal=TERM", number)  # to the launchers, as pre-emption and --signal do
        slurm.wait_until(lambda: slurm.about(number)["Restarts"] == "1", log)
        assert "Exited with exit code 75" in log.read_text()
        # Slurm would wait two minutes; at once, the node still refuses the job that it has just ended.
        slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now+15")
        slurm.wait_until(lambda: "going on from" in log.read_text(), log)
        assert f"job {number}, start 2:" in log.read_text()
        slurm.call("scancel", "--full", "--signal=KILL", number)

        number, log = slurm.submit(SCRIPT, str(run.config), "no.such.key=1", **environment)
        slurm.wait_until(lambda: slurm.about(number)["JobState"] == "FAILED", log)
        assert slurm.about(number)["ExitCode"] == f"{MISTAKE}:0"
        assert slurm.about(number)["Restarts"] == "0"


def test_the_launcher_gets_all_cores_that_were_asked_for(tmp_path):
    cores = os.cpu_count()
    python = interpreter(tmp_path, 'echo "threads: $OMP_NUM_THREADS"; exit 2')
    with one_node(tmp_path) as slurm:
        number, log = slurm.submit(
            f"--cpus-per-task={cores}",
            SCRIPT,
            "recipe.yaml",
            PYTHON=python,
            OMP_NUM_THREADS="",
            CUDA_VISIBLE_DEVICES="",
        )
        slurm.wait_until(lambda: slurm.about(number)["JobState"] == "FAILED", log)
        assert f"threads: {cores}\n" in log.read_text()


@pytest.mark.slow
def test_a_job_whose_launchers_failed_is_queued_again_and_its_failures_are_kept_beside_its_log(tmp_path):
    python = interpreter(tmp_path, "exit 1")
    with one_node(tmp_path) as slurm:
        number, log = slurm.submit(SCRIPT, "recipe.yaml", PYTHON=python)
        slurm.wait_until(lambda: slurm.about(number)["Restarts"] == "1", log)
        assert (tmp_path / f"slurm-{number}.failures").read_text().count("status 1") == 1
