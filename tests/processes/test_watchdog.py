import json
import os
import re
import signal
import threading
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import pytest
from launching import launcher, started
from raising import raises
from torch.distributed import HashStore

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, DistapError
from distap.processes.forks import in_daemon
from distap.processes.meeting import Party, RankProcess, gather_members
from distap.processes.watchdog import Watchdog, is_of_the_network
from distap.storage.remotes import UnreachableError


def test_a_store_for_checkpoints_that_fails_is_no_lost_rank():
    assert is_of_the_network(RuntimeError("Connection reset by peer"))
    assert not is_of_the_network(
        UnreachableError("storage.unreachable", "Connection reset by peer")
    )


class Held(set):
    """What a thread's work holds; a plain set cannot be watched."""


def test_what_a_daemon_held_is_freed_before_its_result_is_told():
    held = Held()
    begin = threading.Event()
    freed = []
    watched = weakref.ref(held)
    done = in_daemon(lambda held=held: begin.wait() and len(held), "a test")
    done.add_done_callback(lambda _: freed.append(watched() is None))
    del held
    begin.set()
    assert done.result() == 0 and freed == [True]


@dataclass
class Ended:
    """A job that has ended, and how."""

    status: int
    left: list[int]  # processes that still run
    said: str
    lost: int  # the process of the rank that the others lost


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Jobs that each lose a rank, side by side, since each waits for its timeout."""
    behaviours = {
        # rank 0 tells the others of the rest, and rank 1 does not
        "stopped 0": ("go_on", 3, 5),
        "stopped 1": ("go_on", 3, 5),
        "stuck": ("stuck", 2, 3),
        "absent": ("absent", 3, 5),
    }
    with ExitStack() as stack:
        jobs = {}
        lost = {}
        for name, (behaviour, size, timeout_seconds) in behaviours.items():
            folder = tmp_path_factory.mktemp(behaviour)
            options = f"--standalone --nproc-per-node={size}"
            command = launcher(options, behaviour, folder, timeout_seconds)
            jobs[name] = stack.enter_context(started(command, folder))
        for name, rank in (("stopped 0", 0), ("stopped 1", 1)):
            jobs[name].wait_for_step(2, 5)
            lost[name] = jobs[name].pid(rank)
            os.kill(lost[name], signal.SIGSTOP)
        statuses = {name: job.status(seconds=120) for name, job in jobs.items()}
        lost["stuck"] = jobs["stuck"].pid(1)
        yield {
            name: Ended(statuses[name], job.left(), job.said, lost.get(name, 0))
            for name, job in jobs.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped 0", "stopped 1", "stuck", "absent"])
def test_a_job_that_lost_a_rank_has_failed_and_leaves_no_process(ended, name):
    assert (ended[name].status, ended[name].left) == (FAILED, [])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_all_others_name_a_stopped_rank_and_the_collective(ended, rank):
    job = ended[f"stopped {rank}"]
    silent = rf"rank {rank} \(\S+, pid {job.lost}\) has not been heard of for \d+ s"
    late = r"rank \d: all_gather of rows \(gather of step \d+\) did not finish within 5 s: "
    # The launcher may quote one of them again.
    own = [line for line in job.said.splitlines() if not line.startswith("error of rank")]
    assert len(re.findall(late + silent, "\n".join(own))) == 2, job.said


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_named_with_what_it_does(ended):
    job = ended["stuck"]
    stuck = (
        rf"rank 1 \(\S+, pid {job.lost}\) has not reached it; it has been in describe of step"
        r" 3 for \d+ s"
    )
    # Both say so, and the stuck one where it stands.
    assert len(re.findall(stuck, job.said)) == 2, job.said
    assert "time.sleep(600)" in job.said


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named_on_all_others(ended):
    absent = r"rank 1 of 3 did not join within 5 s; those that did: rank 0 \("
    assert len(re.findall(absent, ended["absent"].said)) == 2


def test_hosts_that_expect_other_numbers_of_ranks_are_told_both():
    store = HashStore()
    first = in_daemon(lambda: gather_members(store, RankProcess(0), 2, 9, 1e9), "a test")
    with raises("ranks.sizes_differ", "rank 1", "3", "rank 0", "2"):
        gather_members(store, RankProcess(1), 3, 9, 1e9)
    assert len(first.result()[1]) == 2


class CountingStore:
    """A store that counts the requests of each kind."""

    def __init__(self):
        self.requests = Counter()
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=1))

    def clone(self):
        return self

    def __getattr__(self, name):
        def request(*arguments):
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return request


def watchdog(store, rank, size):
    members = [RankProcess(rank) for rank in range(size)]
    return Watchdog(Party(store, members, "here:1", rank, serves=False), timeout_seconds=1)


def test_no_rank_reads_the_heartbeats_of_others_while_all_go_on():
    store = CountingStore()
    watched = [watchdog(store, rank, 4) for rank in range(4)]
    while store.requests["set"] < 20:
        for engine in watched:
            with engine.collective("barrier"):
                pass
    for engine in watched:
        engine.stop()
    assert set(store.requests) == {"set", "check", "add"}


def test_the_farewell_of_a_mistake_tells_the_others_not_to_start_again():
    for error, status in (
        (DistapError("data.missing", "no such data"), MISTAKE),
        (KeyError("a fault"), FAILED),
    ):
        store = CountingStore()
        watchdog(store, 1, 2).stop(error)
        message = json.loads(store.get("beat/1"))
        assert message["status"] == status and message["left"].startswith(type(error).__name__)


@pytest.mark.parametrize("status", [FINISHED, RESTART, 139])
def test_a_verdict_in_the_store_gives_no_status_but_that_of_a_failure_or_a_mistake(status):
    store = CountingStore()
    watched = watchdog(store, 0, 2)
    store.set("verdict", json.dumps(["all is well", status]))
    reads = store.requests["get"] + store.requests["multi_get"]
    while store.requests["get"] + store.requests["multi_get"] < reads + 3:
        with watched.collective("barrier"):
            pass
    assert watched.verdict is None
    watched.stop()
