"""What the scripts in launch/ decide by themselves: when to start again, and what they tell the
launcher.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from launching import started

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = ("again", "train-one-node", "train-multi-node", "slurm/train.sbatch")


def again(tmp_path, statuses, *options, program="") -> subprocess.CompletedProcess[str]:
    """Runs a command that leaves with these statuses, one after the other."""
    (tmp_path / "statuses").write_text("\n".join(map(str, statuses)) + "\n")
    leave = 'status=$(head -n 1 statuses) && sed -i 1d statuses && echo ran && exit "$status"'
    command = [LAUNCH / "again", "--pause", "0", *options, "bash", "-c", program + leave]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)


def told(script, *arguments, **environment) -> list[str]:
    """What the script would start: its interpreter is `echo`."""
    unset = {"OMP_NUM_THREADS": None, "VIRTUAL_ENV": None}
    environment = os.environ | unset | {"PYTHON": "echo", "CUDA_VISIBLE_DEVICES": ""} | environment
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [LAUNCH / script, *arguments, "recipe.yaml", "steps=3"]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()


def script_in(folder, name, text) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("statuses", "left", "runs"),
    [
        ([0], 0, 1),
        ([2], 2, 1),
        ([1, 137, 0], 0, 3),
        ([75] * 5 + [0], 0, 6),  # behind checkpoints there is no limit
        ([1, 1, 1, 0], 1, 3),
        ([1, 1, 75, 1, 1, 0], 0, 6),  # failures in a row count
    ],
)
def test_a_status_says_whether_the_launcher_is_started_again(tmp_path, statuses, left, runs):
    done = again(tmp_path, statuses, "--attempts", "3")
    assert (done.returncode, done.stdout.count("ran")) == (left, runs), done.stderr


def test_pauses_between_failures_double(tmp_path):
    output = again(tmp_path, [1, 1, 1], "--attempts", "3", "--pause", "1").stderr
    assert output.index("starting again in 1 s") < output.index("starting again in 2 s"), output
    # Nor does a start that waits in vain for other hosts count as one that ran well.
    assert int((LAUNCH / "again").read_text().partition("\nSETTLED=")[2].split()[0]) >= 1200


@pytest.mark.parametrize(
    ("statuses", "left"),
    [
        ([75] * 7 + [1, 0], [0] * 9),  # stops and the loss of a node count for nothing
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 1]),
        ([1, 1, 75, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]),  # failures in a row count
        ([1, 1, 1, 1, 2, 1], [0, 0, 0, 0, 2, 0]),
    ],
)
def test_a_batch_job_is_queued_again_until_its_launchers_have_failed_too_often(
    tmp_path, statuses, left
):
    """With stand-ins for the commands of Slurm; tests/launch/test_slurm.py has a real one."""
    for name in ("scontrol", "srun"):
        script_in(tmp_path, name, f'[ {name} = scontrol ] || exit "$STATUS"')
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1"}
    names |= os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    seen = []
    with (tmp_path / "log").open("a") as log:
        for start, status in enumerate(statuses):
            environment = names | {"SLURM_RESTART_COUNT": str(start), "STATUS": str(status)}
            command = ["bash", LAUNCH / "slurm/train.sbatch", "recipe.yaml"]
            seen.append(subprocess.run(command, env=environment, stdout=log, stderr=log).returncode)
    assert seen == left, (tmp_path / "log").read_text()


def test_all_nodes_of_a_batch_job_get_one_random_secret(tmp_path):
    script_in(tmp_path, "scontrol", "echo n")
    script_in(tmp_path, "srun", 'echo "$DISTAP_SECRET" >> secrets')
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    for inputs in ({}, {}, {"DISTAP_SECRET": "given"}):
        with (tmp_path / "log").open("a") as log:
            command = ["bash", LAUNCH / "slurm/train.sbatch", "recipe.yaml"]
            subprocess.run(command, env=environment | inputs, stdout=log, stderr=log, check=True)
    first, second, last = (tmp_path / "secrets").read_text().split()
    assert len(first) == len(second) == 64 and first != second and last == "given"


HEARING = "trap 'echo heard >> heard; exit 75' TERM INT; trap 'touch traced' USR1; touch ready; "


@pytest.fixture
def hearing(tmp_path):
    """A command that `again` has started and that hears signals."""
    program = f"cd {tmp_path}; {HEARING} while true; do read -t 0.1 <> <(:); done"
    with started([str(LAUNCH / "again"), "bash", "-c", program], tmp_path) as job:
        job.wait_until((tmp_path / "ready").exists)
        yield job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_once_and_it_is_not_started_again(hearing, tmp_path, number):
    hearing.process.send_signal(signal.SIGUSR1)  # a request for a trace ends nothing
    hearing.wait_until((tmp_path / "traced").exists)
    hearing.process.send_signal(number)
    assert hearing.status() == 75
    assert (tmp_path / "heard").read_text() == "heard\n"
    hearing.wait_until_none_is_left()


def test_the_command_is_told_when_the_script_is_killed(hearing, tmp_path):
    hearing.process.kill()
    hearing.process.wait()
    hearing.wait_until_none_is_left()
    assert (tmp_path / "heard").exists()


def test_one_rank_a_gpu_that_may_be_used(tmp_path):
    assert "--nproc-per-node=1" in told("train-one-node")
    assert "--nproc-per-node=3" in told("train-one-node", CUDA_VISIBLE_DEVICES="0,2,5")
    assert "--nproc-per-node=4" in told(
        "train-one-node", "--ranks", "4", CUDA_VISIBLE_DEVICES="0,2,5"
    )
    listing = script_in(
        tmp_path, "nvidia-smi", "echo 'GPU 0: one'; echo '  MIG 1g: part'; echo 'GPU 1: two'"
    )
    path = f"{listing.parent}:{os.environ['PATH']}"
    assert "--nproc-per-node=2" in told("train-one-node", PATH=path, CUDA_VISIBLE_DEVICES=None)


def test_ranks_share_the_cores_unless_they_were_told(tmp_path):
    python = str(script_in(tmp_path, "python", 'echo "$OMP_NUM_THREADS"'))
    cores = len(os.sched_getaffinity(0))
    assert told("train-one-node", "--ranks", "2", PYTHON=python) == [str(max(cores // 2, 1))]
    assert told("train-one-node", PYTHON=python, OMP_NUM_THREADS="7") == ["7"]


def test_several_hosts_meet_where_they_are_told_to():
    arguments = ["--nodes", "4", "--node", "3", "--host", "10.77.9.1:555", "--ranks", "2"]
    line = " ".join(told("train-multi-node", *arguments))
    assert (
        "--nnodes=4 --nproc-per-node=2 --node-rank=3 --master-addr=10.77.9.1 --master-port=555"
        in line
    )
    assert line.endswith("recipe.yaml steps=3")
    unknown = told(
        "train-multi-node", "--nodes", "2", "--node", "0", "--host", "node-that-nobody-knows"
    )
    assert {"--master-addr=node-that-nobody-knows", "--master-port=29500"} < set(unknown)


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("train-one-node", ["--rank", "2"], "--rank is no option"),
        ("train-one-node", ["--ranks", "two"], "--ranks two: a whole number is expected"),
        ("train-one-node", ["--ranks", "0", "recipe.yaml"], "--ranks 0: one or more"),
        ("train-multi-node", ["recipe.yaml"], "--nodes: how many hosts"),
        (
            "train-multi-node",
            ["--nodes", "2-4", "--host", "h", "recipe.yaml"],
            "--nodes 2-4: a whole number",
        ),
        (
            "train-multi-node",
            ["--nodes", "2", "--host", "h", "r"],
            "--node: which of the hosts is this, 0 to 1?",
        ),
        (
            "train-multi-node",
            ["--nodes", "2", "--node", "2", "--host", "h", "r"],
            "--node: which of the hosts is",
        ),
        (
            "train-multi-node",
            ["--nodes", "2", "--node", "0", "recipe.yaml"],
            "--host: at which host",
        ),
        (
            "train-multi-node",
            ["--nodes", "2", "--node", "0", "--host", "h:abc", "r"],
            "--host h:abc: the port is no",
        ),
        (
            "train-multi-node",
            ["--nodes", "2", "--node", "0", "--host", "fe80::1", "r"],
            "--host fe80::1: HOST, HOST",
        ),
        ("again", ["--attempts", "many", "true"], "whole numbers are expected"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(script, arguments, reason):
    done = subprocess.run([LAUNCH / script, *arguments], capture_output=True, text=True)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("script", ["again", "train-one-node", "train-multi-node"])
def test_the_help_names_every_option_that_is_read(script):
    text = (LAUNCH / script).read_text()
    output = subprocess.run(
        [LAUNCH / script, "--help"], check=True, capture_output=True, text=True
    ).stdout
    read = {
        word
        for line in text.splitlines()
        if ")" in line
        for word in line.strip().split(")")[0].split(" | ")
    }
    options = {word for word in read if word.startswith("--") and word != "--*"}
    assert options and all(option in output for option in options - {"--help"})


def test_the_scripts_have_no_mistake_that_shellcheck_knows():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is missing")
    command = [
        "shellcheck",
        "--external-sources",
        *(LAUNCH / script for script in SCRIPTS),
        LAUNCH / "this-host.sh",
    ]
    done = subprocess.run(command, cwd=LAUNCH.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
