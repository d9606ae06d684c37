import os
import subprocess
import sys
from pathlib import Path

from launching import HELPERS, OF_JOBS
from ranks import skip_if_fast
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from distap.processes import rank_server as server_module
from distap.processes.rank_server import rank_server

COMPUTED_BEFORE = """
import torch
(torch.randn(1000, 1000) @ torch.randn(1000, 1000)).exp().sum()
print("said once")
"""
AUTOGRAD_HAS_THREADS = """
import torch
from torch._subclasses import FakeTensorMode

with FakeTensorMode():
    torch.ones(1, device="cuda")  # from now on autograd takes it that there is a GPU
torch.ones(1, requires_grad=True).backward()
"""
CHILDREN_IGNORED = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""
NO_THIRD_FORK = """
import os
forks, fork = [], os.fork

def limited():
    forks.append(1)
    if len(forks) > 2:
        raise BlockingIOError("no more processes")
    return fork()

os.fork = limited
"""
LAUNCH = """
from distap.launcher import launch
print("status", launch(["--standalone", "--nproc-per-node=1"], "computing", [], 5, 20))
"""


def launched_after(code, **environment):
    """A launcher in a new interpreter that runs this code first, whose output is no terminal."""
    skip_if_fast("launchers")
    env = os.environ | OF_JOBS | {"PYTHONUNBUFFERED": ""} | environment
    command = [sys.executable, "-c", code + LAUNCH]
    return subprocess.run(command, cwd=HELPERS, env=env, capture_output=True, text=True, timeout=120)


def test_ranks_compute_though_their_launcher_has_computed_with_threads_and_has_printed():
    ended = launched_after(COMPUTED_BEFORE, OMP_NUM_THREADS="2")
    assert ended.stdout.split("\n") == ["said once", "computed with 2 threads", "status 0", ""], ended.stderr


def test_ranks_differentiate_though_autograd_has_threads_in_their_launcher():
    ended = launched_after(AUTOGRAD_HAS_THREADS)
    assert "status 0" in ended.stdout, ended.stderr


def test_a_list_of_numbers_of_threads_is_understood():
    assert "computed with 2 threads" in launched_after("", OMP_NUM_THREADS="2,1").stdout


def test_a_launcher_whose_supervisor_ignores_the_end_of_children_sees_ranks_end():
    assert "status 0" in launched_after(CHILDREN_IGNORED).stdout


def test_a_rank_that_cannot_be_forked_is_told_and_not_waited_for():
    ended = launched_after(NO_THIRD_FORK)
    assert ended.returncode == 1
    assert "no more processes" in ended.stderr and "a rank could not be forked" in ended.stderr


def test_a_process_that_has_a_gpu_open_is_not_forked(monkeypatch):
    monkeypatch.setattr(server_module, "GPU_FILES", (os.devnull,))
    with Path(os.devnull).open(), rank_server("computing") as start:
        assert start is get_subprocess_handler
