"""Who listens, and where: the table of docs/SECURITY.md."""

import subprocess
import sys
from contextlib import suppress

import pytest
from launching import Program, started
from servers import free_ports
from sockets import Listening, parent, sockets_of
from trainings import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
LOOPBACK = "127.0.0.1"


def held_until_the_end(job):
    """All sockets at which a job listens before it ends."""
    sockets = set()
    while job.process.poll() is None:
        sockets.update(*sockets_of(job.left()).values())
        with suppress(subprocess.TimeoutExpired):
            job.process.wait(0.05)
    return sockets


@pytest.mark.slow
def test_the_processes_of_one_host_listen_at_its_loopback_address_or_nowhere(
    tmp_path, training_shards
):
    port = free_ports(2)
    run = Run(tmp_path, training_shards, steps=100_000, metrics={"port": port}, data__workers=1)
    page = run.folder / "report.html"
    following = ("-m", "distap.cli", "report", str(run.folder), "--follow", "1")
    evaluating = ("-m", "distap.cli", "eval", "--checkpoint", str(run.folder))
    data = ("--data", str(training_shards[1]))
    with run.started(2) as job:
        job.wait_until(lambda: run.has_done(4))
        held = sockets_of(job.left())
        ranks = [job.pid(rank) for rank in range(2)]
        workers = {pid for pid in held if parent(pid) in ranks}
        with started(Program(following), tmp_path / "report") as report:
            report.wait_until(page.exists)
            assert set().union(*sockets_of(report.left()).values()) == set()
        with started(Program(evaluating + data), tmp_path / "eval") as evaluation:
            assert held_until_the_end(evaluation) == set()
            assert evaluation.status() == 0, evaluation.said
    assert held.pop(job.process.pid) == set()
    for rank, pid in enumerate(ranks):
        sockets = held.pop(pid)
        assert Listening(LOOPBACK, port + rank) in sockets
        assert {socket.address for socket in sockets} == {LOOPBACK}
    [store] = held.keys() - workers
    assert len(workers) == 2
    assert [held[worker] for worker in workers] == [set(), set()]
    assert [socket.address for socket in held[store]] == [LOOPBACK]
