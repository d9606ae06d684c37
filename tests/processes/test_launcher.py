import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from launching import HELPERS, OF_JOBS, launcher, started
from raising import raises
from ranks import skip_if_fast
from servers import free_ports

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, DistapError
from distap.launcher import launch, launch_training
from distap.processes.agent import status_of

ASKED_WHILE_TORCH_IS_READ = """
import os, signal, sys

asked = []

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == sys.argv[1] and not asked:
            asked.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder)
from distap.launcher import main
main()
"""
COMPUTE = """
from distap.launcher import launch
print("status", launch(["--nproc-per-node=1"], "computing", [], 5))
"""
TWO = "--nproc-per-node=2"


def test_ranks_that_finish_give_status_0(tmp_path):
    with started(launcher(TWO, "finish", tmp_path).command, tmp_path) as job:
        assert (job.status(), job.left()) == (FINISHED, [])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
@pytest.mark.parametrize(
    "host",
    [
        'hostname nobody-knows-it && exec "$@"',
        'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"',
        'exec "$@" <&- >&-',
        'exec "$@" <&- 2>&-',
    ],
)
def test_ranks_of_a_host_that_lacks_something_meet(tmp_path, host):
    command = [
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-c",
        host,
        "sh",
        *launcher(TWO, "finish", tmp_path).command,
    ]
    with started(command, tmp_path) as job:
        assert job.status() == FINISHED, job.said


def test_a_mistake_is_not_tried_again_and_gives_status_2(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "mistake", tmp_path), tmp_path) as job:
        assert (job.status(), job.left()) == (MISTAKE, [])
        assert not (tmp_path / "0.1").exists()
        assert "rank 1" in job.said and "left: DistapError: no such data" in job.said


# torch takes an error of numpy's for its absence
@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_a_signal_in_the_first_seconds_is_heard(package):
    command = [sys.executable, "-c", ASKED_WHILE_TORCH_IS_READ, package]
    early = subprocess.run(command, capture_output=True, text=True)
    assert (early.returncode, early.stderr) == (RESTART, "")


def test_a_terminal_that_is_closed_asks_ranks_to_stop(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(1, 5)
        os.kill(job.process.pid, signal.SIGHUP)
        assert job.status() == RESTART
        assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(2)), job.said


@pytest.mark.parametrize(
    ("option", "why"),
    [
        *((f"--nnodes={hosts}", f"--nnodes {hosts}: ") for hosts in ("1:2", "0", "two")),
        ("--nnodes=2 --max-restarts=1", "--max-restarts: is for one host"),
        ("--nnodes=2 --node-rank=2", "--node-rank 2: expected one of 0 to 1"),
        (
            "--nnodes=2 --rdzv-endpoint=a:1",
            "--rdzv-endpoint: .* no such option; several hosts meet at --master-addr",
        ),
        ("--tee=3", "--tee: distap.launcher has no such option"),
    ],
)
def test_options_that_cannot_be_are_refused(option, why):
    with pytest.raises(DistapError, match=why):
        launch(option.split(), "launched", [], 20)


def test_what_the_environment_asks_of_torchrun_alone_is_refused(monkeypatch):
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    with raises("command.unknown_option", "--rdzv-backend"):
        launch(["--nproc-per-node=2"], "launched", [], 20)


def test_a_signal_that_comes_when_the_ranks_have_left_does_not_hide_how(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(0, 5)
        ranks = {job.pid(0), job.pid(1)}
        os.kill(job.pid(0), signal.SIGTERM)
        job.wait_until(lambda: not ranks & set(job.left()))
        status = None
        while status is None:
            job.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                status = job.process.wait(0.2)
        assert status == RESTART, job.said
        assert "not all ranks finished" not in job.said  # an ordinary pre-emption is no error


def test_the_end_of_a_killed_torchrun_is_that_of_its_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", *TWO.split(), "-m", "launched"]
    command += ["go_on", str(tmp_path), "60"]
    with started(command, tmp_path) as job:
        job.wait_for_step(1, 5)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        job.wait_until_none_is_left()


def test_a_wrong_recipe_starts_no_rank(tmp_path):
    with raises("recipe.not_found"):
        launch_training(TWO.split(), tmp_path / "missing.yaml", [])


@pytest.mark.parametrize(
    ("ranks", "why"), [("gpu", "Cuda is not available"), ("many", "many"), ("0", "one rank")]
)
def test_a_number_of_ranks_that_cannot_be_is_refused(monkeypatch, ranks, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises("command.wrong_ranks", ranks, why, "--nproc-per-node"):
        launch([f"--nproc-per-node={ranks}"], "launched", [], grace_seconds=20)


def test_a_mistake_of_one_rank_goes_before_a_request_to_another_and_that_before_a_crash():
    assert status_of({0: RESTART, 1: RESTART}) == RESTART
    assert status_of({0: RESTART, 1: FAILED}) == RESTART
    assert (
        status_of({0: FAILED, 1: FINISHED})
        == status_of({0: -signal.SIGKILL}, is_asked=True)
        == FAILED
    )
    assert status_of({0: -signal.SIGTERM, 1: FINISHED}, is_asked=True) == RESTART
    assert status_of({0: FAILED, 1: MISTAKE}) == status_of({0: RESTART, 1: MISTAKE}) == MISTAKE


@pytest.mark.parametrize(
    "before", ["", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"]
)
def test_ranks_compute_with_their_threads_whatever_their_supervisor_ignores(before):
    ended = launched_after(before, OMP_NUM_THREADS="2,1")
    assert ended.stdout.split("\n") == ["computed with 2 threads", "status 0", ""], ended.stderr


def launched_after(code, **environment):
    """A launcher in a new interpreter that runs this code first, whose output is no terminal."""
    skip_if_fast("launchers")
    env = os.environ | OF_JOBS | {"PYTHONUNBUFFERED": ""} | environment
    command = [sys.executable, "-c", code + COMPUTE]
    return subprocess.run(
        command, cwd=HELPERS, env=env, capture_output=True, text=True, timeout=300
    )


def test_a_host_that_waits_for_another_can_be_stopped(tmp_path):
    alone = launcher(
        f"--nnodes=2 --node-rank=1 --master-port={free_ports(1)}", "finish", tmp_path, 600
    )
    with started(alone, tmp_path) as job:
        job.pid(1)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status(seconds=120) == RESTART


def test_hosts_meet_as_an_operator_tells_them_by_the_environment(tmp_path):
    """What Kubeflow Trainer sets, without any option."""
    message = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_ports(1)),
    }
    command = launcher("", "finish", tmp_path)
    with (
        started(command, tmp_path / "first", PET_NODE_RANK="0", **message) as first,
        started(command, tmp_path / "second", PET_NODE_RANK="1", **message) as second,
    ):
        assert (first.status(), second.status()) == (FINISHED, FINISHED)
    assert {path.name for path in tmp_path.glob("?.?")} == {"0.0", "1.0"}
