import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from launching import LAUNCH, launcher, started
from servers import free_ports
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.run import get_args_parser

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, DistapError
from distap.launcher import job_of, launch, launch_training
from distap.processes.agent import Agent, free_lock
from distap.processes.exit_statuses import JOB, status_of
from distap.processes.stopping import TRACE_SIGNAL

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
MEETS = """
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
meet = DynamicRendezvousHandler.next_rendezvous
def said_to_meet(handler):
    print("meeting", flush=True)
    return meet(handler)
DynamicRendezvousHandler.next_rendezvous = said_to_meet
"""
TWO = "--standalone --nproc-per-node=2"


def test_ranks_that_finish_give_status_0(tmp_path):
    with started(launcher(TWO, "finish", tmp_path).command, tmp_path) as job:
        assert job.status() == FINISHED
        assert job.left() == []


def test_a_mistake_is_not_tried_again_and_gives_status_2(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "mistake", tmp_path), tmp_path) as job:
        assert job.status() == MISTAKE
        assert job.left() == []
        assert not (tmp_path / "0.1").exists()
        assert "rank 1" in job.said and "left: DistapError: no such data" in job.said


def test_ranks_write_to_the_files_that_torchrun_names(tmp_path):
    options = f"{TWO} --redirects=3 --log-dir={tmp_path / 'logs'}"
    with started(launcher(options, "mistake", tmp_path), tmp_path) as job:
        assert job.status() == MISTAKE
    (said,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "error of rank 1: no such data" in said.read_text()
    assert "error of rank 1" not in job.said


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


@pytest.mark.parametrize("package", ["torch", "numpy"])  # torch takes an error of numpy's for its absence
def test_a_signal_in_the_first_seconds_is_heard(package):
    command = [sys.executable, "-c", ASKED_WHILE_TORCH_IS_READ, package]
    early = subprocess.run(command, capture_output=True, text=True)
    assert (early.returncode, early.stderr) == (RESTART, "")


def test_a_host_that_leaves_the_meeting_does_not_end_it_for_the_others(tmp_path):
    where = f"--nnodes=3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_ports(1)} --rdzv-id=m"
    conf = "--rdzv-conf=join_timeout=600,is_host="
    first, second = ([sys.executable, "-c", MEETS + LAUNCH, f"{where} {conf}{is_host}"] for is_host in (1, 0))
    of_ranks = ["launched", f"finish {tmp_path} 5", "5"]
    with (
        started([*first, *of_ranks], tmp_path / "one") as one,
        started([*second, *of_ranks], tmp_path / "two") as two,
    ):
        for job in (one, two):
            job.wait_until(lambda job=job: "meeting" in job.said)
        two.process.terminate()
        assert two.status() == RESTART
        with started([*second, *of_ranks], tmp_path / "two again") as again:
            again.wait_until(lambda: "meeting" in again.said)
            assert one.process.poll() is None, one.said
            one.process.terminate()
            assert one.status() == RESTART, one.said


def test_a_terminal_that_is_closed_asks_ranks_to_stop(tmp_path):
    with started(launcher(f"{TWO} --max-restarts=3", "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(1, 5)
        os.kill(job.process.pid, signal.SIGHUP)
        assert job.status() == RESTART
        assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(2)), job.said


def test_ranks_that_stop_for_new_hosts_have_the_grace_time():
    asked = []
    agent = Agent.__new__(Agent)
    agent._worker_watchdog = agent._health_check_server = None
    agent._shutdown_timeout = 123
    agent._pcontext = SimpleNamespace(subprocess_handlers={}, close=lambda *how: asked.append(how))
    agent._stop_workers(None)
    assert asked == [(signal.SIGTERM, 123)]


@pytest.mark.parametrize("hosts", ["3:2", "0", "two", "1:2:3"])
def test_a_number_of_hosts_that_cannot_be_is_refused(hosts):
    with pytest.raises(DistapError, match=f"--nnodes {hosts}: expected a number of hosts"):
        launch([f"--nnodes={hosts}"], "launched", [], 20, 5)


@pytest.mark.parametrize(
    ("options", "job"),
    [
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=b:1", "a at b:1"),
        ("--nnodes=1:4 --rdzv-endpoint=b:1", "none at b:1"),
        ("--nnodes=2 --rdzv-id=a --master-addr=b", None),
        ("--nnodes=1 --rdzv-id=a --rdzv-endpoint=localhost:1", None),
        ("--standalone", None),
    ],
)
def test_a_job_of_several_hosts_is_known_by_its_id_and_meeting_point(options, job):
    settings = get_args_parser().parse_args([*options.split(), "launched"])
    assert job_of(settings).get(JOB) == job


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


def test_a_trace_is_asked_for_though_numpy_has_threads_that_could_take_the_signal(tmp_path):
    with started(launcher(TWO, "trace_when_asked", tmp_path).command, tmp_path, OMP_NUM_THREADS="4") as job:
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


def test_a_mistake_of_one_rank_goes_before_a_request_to_another_and_that_before_a_crash():
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


def test_a_signal_in_the_midst_of_a_fork_is_not_lost(monkeypatch):
    def start_workers(self, group):
        with suppress(SignalException):  # as Python drops what is raised there
            torch_processes._terminate_process_handler(signal.SIGTERM, None)
        return {}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start_workers)
    agent = Agent.__new__(Agent)
    agent._has_started = False
    with pytest.raises(SignalException):
        agent._start_workers(None)
