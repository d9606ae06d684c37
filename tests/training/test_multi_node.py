"""The scripts that start a training on one host and on several."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts import Hosts
from launching import HELPERS, ROOT, Job, started
from stores import list_checkpoints
from trainings import Run

from distap.errors import FAILED, FINISHED


def environment(run: Run) -> dict[str, str]:
    """Has the scripts run the programs as they are, with a record of every batch."""
    path = f"{HELPERS / 'recording'}:{HELPERS}:{ROOT}"
    return {**run.environment, "PYTHON": sys.executable, "PYTHONPATH": path}


def small_run(folder, shards) -> Run:
    # a host waits as long for the other too
    return Run(folder, shards, steps=30, timeout_seconds=30.0)


@contextmanager
def part(hosts: Hosts, number: int, run: Run) -> Iterator[Job]:
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
    with started(command, run.folder.parent, **environment(run)) as job:
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
