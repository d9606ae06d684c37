"""Ranks on two hosts whose network breaks for good."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts import Hosts
from launching import Job, started
from trainings import Run

from distap.errors import FAILED
from distap.processes.agent import LEAVE_SECONDS
from distap.processes.watchdog import VERDICT_SECONDS

TIMEOUT_SECONDS = 15.0  # a host waits as long for the other to start
# As the launcher's docstring says, with as much again for slow machines.
BOUND_SECONDS = 2 * (TIMEOUT_SECONDS + VERDICT_SECONDS + LEAVE_SECONDS)


@contextmanager
def job(hosts: Hosts, number: int, run: Run) -> Iterator[Job]:
    """The launcher on host a (0) or b (1), with one rank of a training."""
    options = (
        f"--nnodes=2 --nproc-per-node=1 --node-rank={number} --master-addr={hosts.addresses[0]}"
    )
    command = hosts.on(number, run.launch(options).command)
    with started(
        command, run.folder.parent, **run.environment, GLOO_SOCKET_IFNAME=hosts.cards[number]
    ) as launched:
        yield launched


@pytest.mark.cluster
@pytest.mark.slow
def test_both_sides_of_a_cut_network_leave_within_the_bound(hosts, tmp_path, training_shards):
    run = Run(
        tmp_path,
        training_shards,
        steps=99_999,
        checkpoint={"every": 99_999},
        timeout_seconds=TIMEOUT_SECONDS,
    )
    with job(hosts, 0, run) as a, job(hosts, 1, run) as b:
        a.wait_until(lambda: run.has_done(1))
        hosts.cut()
        assert a.status(BOUND_SECONDS) == FAILED
        assert b.status(BOUND_SECONDS) == FAILED
        assert a.left() == b.left() == []
        where = r"rank \d: \w+(?: of [\w ]+)? \(\w+ (of|after) step \d+\)"
        late = f"did not finish within {TIMEOUT_SECONDS:g} s"
        silent = rf"{where} {late}: rank \d \(host-b, pid \d+\) has not been heard of for \d+ s"
        assert re.search(silent, a.said), a.said
        cut_off = rf"{where} ({late}|cannot go on): the store at 10.77.0.1:\d+ has not answered"
        assert re.search(cut_off, b.said), b.said
        assert re.search(r"nothing is known of rank \d \(host-a, pid \d+\)", b.said), b.said
