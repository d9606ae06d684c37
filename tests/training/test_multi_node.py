"""The scripts that start a training on one host and on several, and what strangers reach of it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts import Hosts
from launching import HELPERS, ROOT, Job, started
from sockets import Listening, sockets_of
from stores import list_checkpoints
from trainings import Run

from distap.errors import FAILED, FINISHED, MISTAKE

METRICS = 9400
LOOPBACK = "127.0.0.1"
STEPS_AFTER = 60  # longer than it takes a rank to look at the store
SIGNED = {"DISTAP_SECRET": "of this run"}


def environment(run: Run) -> dict[str, str]:
    """Has the scripts run the programs as they are, with a record of every batch."""
    path = f"{HELPERS / 'recording'}:{HELPERS}:{ROOT}"
    return {**run.environment, "PYTHON": sys.executable, "PYTHONPATH": path}


def small_run(folder, shards) -> Run:
    # a host waits as long for the other too
    return Run(folder, shards, steps=30, timeout_seconds=30.0)


def endless_run(folder, shards) -> Run:
    """A run of ranks with metrics and loader workers."""
    metrics = {"port": METRICS}
    return Run(folder, shards, steps=100_000, metrics=metrics, data__workers=1)


def forge_the_end(hosts: Hosts) -> None:
    """Write into the store, from host b, that the training has ended."""
    command = [sys.executable, str(HELPERS / "strangers.py"), f"{hosts.addresses[0]}:29500"]
    subprocess.run(hosts.on(1, command), check=True)


def listening(job: Job) -> set[Listening]:
    return set().union(*sockets_of(job.left()).values())


@contextmanager
def part(hosts: Hosts, number: int, run: Run, **secret: str) -> Iterator[Job]:
    """The script on host a (0) or b (1), told nothing that it can find out itself."""
    script = [
        str(ROOT / "launch/train-multi-node"),
        "--nodes",
        "2",
        "--host",
        hosts.addresses[0],
        "--ranks",
        "1",
    ]
    command = hosts.on(number, [*script, "--node", str(number), str(run.config)])
    with started(command, run.folder.parent, **environment(run), **secret) as job:
        yield job


@pytest.mark.cluster
@pytest.mark.slow
def test_a_host_that_was_cut_off_and_comes_back_goes_on_with_the_other(
    hosts, tmp_path, training_shards
):
    undisturbed = small_run(tmp_path / "undisturbed", training_shards)
    script = [str(ROOT / "launch/train-one-node"), "--ranks", "2", str(undisturbed.config)]
    with started(script, tmp_path / "undisturbed", **environment(undisturbed)) as job:
        assert job.status() == FINISHED, job.said

    run = small_run(tmp_path / "disturbed", training_shards)
    with part(hosts, 0, run) as a, part(hosts, 1, run) as b:
        b.wait_until(lambda: list_checkpoints(run.folder / "checkpoints"))
        hosts.cut()
        b.wait_until(lambda: f"again: status {FAILED}" in b.said)
        hosts.mend()
        assert (a.status(), b.status()) == (FINISHED, FINISHED), a.said + b.said
        assert a.left() == b.left() == []
    assert "starting ranks 1 to 1 of 2, which all meet at 10.77.0.1:29500" in b.said
    assert "going on from" in a.said + b.said
    assert run.batches() == undisturbed.batches()


@pytest.mark.cluster
@pytest.mark.slow
def test_strangers_reach_nothing_of_a_training_on_one_host(hosts, tmp_path, training_shards):
    run = endless_run(tmp_path, training_shards)
    script = [str(ROOT / "launch/train-one-node"), "--ranks", "2", str(run.config)]
    with started(hosts.on(0, script), tmp_path, **environment(run)) as job:
        job.wait_until(lambda: run.has_done(2))
        sockets = listening(job)
        assert {Listening(LOOPBACK, METRICS), Listening(LOOPBACK, METRICS + 1)} <= sockets
        assert hosts.answering(0, sockets) == sockets
        assert {socket.address for socket in sockets} == {LOOPBACK}
        of_network = {Listening(hosts.addresses[0], socket.port) for socket in sockets}
        assert hosts.answering(1, of_network) == set()


@pytest.mark.cluster
@pytest.mark.slow
def test_strangers_reach_the_store_and_gloo_of_two_hosts_and_cannot_end_the_training(
    hosts, tmp_path, training_shards
):
    run = endless_run(tmp_path, training_shards)
    with part(hosts, 0, run, **SIGNED) as a, part(hosts, 1, run, **SIGNED) as b:
        b.wait_until(lambda: run.has_done(2, rank=1))
        for number, job in enumerate((a, b)):
            address = hosts.addresses[number]
            sockets = listening(job)
            assert {socket.address for socket in sockets} == {address, LOOPBACK}
            assert {socket for socket in sockets if socket.address == LOOPBACK} == {
                Listening(LOOPBACK, METRICS)
            }
            stranger = 1 - number
            assert hosts.answering(stranger, {Listening(address, METRICS)}) == set()
            assert hosts.answering(stranger, sockets - {Listening(LOOPBACK, METRICS)})
        forge_the_end(hosts)
        done = run.last_step(rank=1)
        b.wait_until(lambda: run.has_done(done + STEPS_AFTER, rank=1))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_stranger_can_end_a_training_without_a_secret(hosts, tmp_path, training_shards):
    run = endless_run(tmp_path, training_shards)
    with part(hosts, 0, run) as a, part(hosts, 1, run) as b:
        b.wait_until(lambda: run.has_done(2, rank=1))
        forge_the_end(hosts)
        assert (a.status(), b.status()) == (MISTAKE, MISTAKE)
        assert "forged" in b.said
