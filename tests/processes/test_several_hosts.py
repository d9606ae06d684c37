import os
import signal

from launching import launcher, started
from servers import free_ports

from distap.errors import FINISHED, RESTART


def test_a_host_that_waits_for_another_can_be_stopped(tmp_path):
    alone = launcher(f"--nnodes=2 --node-rank=1 --master-port={free_ports(1)}", "finish", tmp_path, 600)
    with started(alone, tmp_path) as job:
        job.pid(1)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status(seconds=120) == RESTART


def test_hosts_meet_as_an_operator_tells_them_by_the_environment(tmp_path):
    """What Kubeflow Trainer sets, without any option."""
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
