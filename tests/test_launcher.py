import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from launching import launcher, started

from distap.agent import free_lock
from distap.errors import DistapError
from distap.exits import FAILED, FINISHED, MISTAKE, RESTART, status_of
from distap.launcher import launch, launch_training
from distap.stopping import TRACE_SIGNAL

ASKED_WHILE_TORCH_IS_READ = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder)
from distap.launcher import main
main()
"""
TWO = "--standalone --nproc-per-node=2"


def test_ranks_that_finish_give_status_0(tmp_path):
    with started(launcher(TWO, "finish", tmp_path), tmp_path) as job:
        assert job.status() == FINISHED
        assert job.left() == []


def test_a_mistake_is_not_tried_again_and_gives_status_2(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "mistake", tmp_path), tmp_path) as job:
        assert job.status() == MISTAKE
        assert job.left() == []
        assert not (tmp_path / "0.1").exists()
        assert "rank 1" in job.said and "left: DistapError: no such data" in job.said


@pytest.mark.slow
def test_a_rank_that_is_killed_brings_all_ranks_back(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=1", "killed_once", tmp_path), tmp_path) as job:
        assert job.status() == FINISHED
        assert sorted(path.name for path in tmp_path.glob("?.?")) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.slow
def test_ranks_that_stop_on_request_give_status_75_and_are_not_started_again(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(0, 5)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status() == RESTART
        assert job.left() == []
        assert not (tmp_path / "0.1").exists()


def test_a_signal_in_the_first_seconds_is_heard():
    early = subprocess.run([sys.executable, "-c", ASKED_WHILE_TORCH_IS_READ], capture_output=True, text=True)
    assert (early.returncode, early.stderr) == (RESTART, "")


def test_a_signal_that_comes_when_the_ranks_have_left_does_not_hide_how(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(0, 5)
        os.kill(job.pid(0), signal.SIGTERM)
        job.wait_until(lambda: job.left() == [job.process.pid])
        status = None
        while status is None:
            job.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                status = job.process.wait(0.2)
        assert status == RESTART, job.said


def test_a_trace_is_asked_for_though_numpy_has_threads_that_could_take_the_signal(tmp_path):
    with started(launcher(TWO, "trace_when_asked", tmp_path), tmp_path, OMP_NUM_THREADS="4") as job:
        job.wait_for_step(1, 5)
        os.kill(job.process.pid, TRACE_SIGNAL)
        assert job.status() == FINISHED, job.said


@pytest.mark.parametrize("by", ["launcher", "torchrun"])
def test_the_end_of_a_killed_launcher_is_that_of_its_ranks(tmp_path, by):
    command = launcher(TWO, "go_on", tmp_path)
    if by == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *TWO.split(), "-m", "launched"]
        command += ["go_on", str(tmp_path), "5"]
    with started(command, tmp_path) as job:
        job.wait_for_step(1, 5)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        job.wait_until_none_is_left()


def test_a_wrong_recipe_starts_no_rank(tmp_path):
    with pytest.raises(DistapError, match="cannot be read"):
        launch_training(TWO.split(), tmp_path / "missing.yaml", [])


def test_a_shutdown_timeout_below_the_grace_time_is_refused(tmp_path):
    with pytest.raises(DistapError, match=r"killed in their grace time of 60 s"):
        launch([*TWO.split(), "--shutdown-timeout=30"], "launched", [], grace_seconds=60, timeout_seconds=5)


@pytest.mark.parametrize(("ranks", "why"), [("gpu", "Cuda is not available"), ("many", "many"), ("0", "one rank")])
def test_a_number_of_ranks_that_cannot_be_is_refused(monkeypatch, ranks, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DistapError, match=f"--nproc-per-node {ranks}: .*{why}"):
        launch(["--standalone", f"--nproc-per-node={ranks}"], "launched", [], grace_seconds=20, timeout_seconds=5)


def test_a_rank_without_an_outcome_has_crashed():
    assert status_of({0: RESTART, 1: RESTART}) == RESTART
    assert status_of({0: RESTART, 1: FAILED}) == RESTART
    assert status_of({}) == status_of({0: FAILED}) == FAILED
    assert status_of({0: FAILED, 1: MISTAKE}) == status_of({0: RESTART, 1: MISTAKE}) == MISTAKE


def test_a_process_whose_poll_was_interrupted_is_seen_to_end():
    class InterruptionError(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise InterruptionError

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            while not process._waitpid_lock.locked():
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                with suppress(InterruptionError):
                    while True:
                        process.poll()
        finally:
            signal.signal(signal.SIGALRM, before)
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        free_lock(process)
        assert process.wait(60) == 1
