import os
import signal

import pytest
from launching import launcher, started
from servers import free_ports

from distap.exits import FINISHED, RESTART

TORCHS_PATIENCE = "join_timeout=60,read_timeout=1"


def options(port: int, conf: str) -> str:
    return f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=meeting --rdzv-conf={conf}"


@pytest.mark.slow
def test_a_host_waits_for_the_one_at_which_all_meet(tmp_path):
    port = free_ports(1)
    first = launcher(options(port, f"{TORCHS_PATIENCE},is_host=0"), "finish", tmp_path)
    second = launcher(options(port, f"{TORCHS_PATIENCE},is_host=1"), "finish", tmp_path)
    with started(first, tmp_path / "first") as early:
        early.wait_until(lambda: f"nobody answers at 127.0.0.1:{port} yet" in early.said)
        with started(second, tmp_path / "second") as late:
            assert (early.status(), late.status()) == (FINISHED, FINISHED)


def test_a_host_that_waits_for_another_can_be_stopped(tmp_path):
    alone = launcher(options(free_ports(1), "is_host=0,join_timeout=600"), "finish", tmp_path)
    with started(alone, tmp_path) as job:
        job.wait_until(lambda: "nobody answers" in job.said)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status(seconds=10) == RESTART


def test_hosts_meet_as_an_operator_tells_them_by_the_environment(tmp_path):
    """What Kubeflow Trainer sets, without any option: torchrun's static rendezvous."""
    told = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_ports(1)),
    }
    command = launcher("", "finish", tmp_path)
    with (
        started(command, tmp_path / "first", PET_NODE_RANK="0", **told) as first,
        started(command, tmp_path / "second", PET_NODE_RANK="1", **told) as second,
    ):
        assert (first.status(), second.status()) == (FINISHED, FINISHED)
    assert {path.name for path in tmp_path.glob("?.?")} == {"0.0", "1.0"}
