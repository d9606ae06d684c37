"""A task of a Slurm array trains its own line of a list. Slurm's programs are stand-ins."""

import os
import subprocess

import pytest
from launching import ROOT

LINES = "a.yaml run=runs/a\nb.yaml 'loss={name: ap_q, bins: 20}'\n"


@pytest.fixture
def submitted(tmp_path):
    for name, text in (("scontrol", "echo node1"), ("srun", 'printf "<%s>" "$@"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (tmp_path / "trainings.txt").write_text(LINES)

    def run(*arguments, **variables):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **variables,
        }
        script = ROOT / "launch/slurm/train.sbatch"
        return subprocess.run(
            ["bash", script, *arguments], env=environment, capture_output=True, text=True
        )

    return run


def test_each_task_takes_its_line_with_what_is_quoted_in_it(submitted):
    done = submitted("trainings.txt", "seed=3", SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 0
    assert done.stdout.endswith("<b.yaml><loss={name: ap_q, bins: 20}><seed=3>")


def test_a_task_without_a_line_is_a_mistake(submitted):
    done = submitted("trainings.txt", SLURM_ARRAY_TASK_ID="3")
    assert done.returncode == 2
    assert "trainings.txt" in done.stderr and "3" in done.stderr


def test_without_an_array_the_recipe_is_taken_as_it_is(submitted):
    assert submitted("a.yaml", "seed=3").stdout.endswith("<a.yaml><seed=3>")
