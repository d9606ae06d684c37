import json
import os
import re
import signal
import threading
import weakref
from collections import Counter
from datetime import timedelta

import pytest
from launching import launcher, started
from torch.distributed import HashStore

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, DistapError
from distap.processes.forks import in_daemon
from distap.processes.meeting import Party, RankProcess, gather_members
from distap.processes.watchdog import Watchdog, is_of_the_network
from distap.storage.remotes import UnreachableError


def test_a_store_for_checkpoints_that_fails_is_no_lost_rank():
    assert is_of_the_network(RuntimeError("Connection reset by peer"))
    assert not is_of_the_network(UnreachableError("Connection reset by peer"))


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


def ranks(number):
    return f"--standalone --nproc-per-node={number}"


@pytest.mark.slow
# the one that tells the others of the rest, and one that does not
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_all_others_with_its_name_and_the_collective(tmp_path, rank):
    with started(launcher(ranks(3), "go_on", tmp_path), tmp_path) as job:
        job.wait_for_step(2, 5)
        stopped = job.pid(rank)
        os.kill(stopped, signal.SIGSTOP)
        assert (job.status(seconds=120), job.left()) == (FAILED, [])
        told = rf"rank {rank} \(\S+, pid {stopped}\) has not been heard of for \d+ s"
        told = (
            rf"rank \d: all_gather of rows \(gather of step \d+\) did not finish within 5 s: {told}"
        )
        assert len(re.findall(told, job.said)) == 2, job.said


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_named_with_what_it_does(tmp_path):
    with started(launcher(ranks(2), "stuck", tmp_path, timeout_seconds=3), tmp_path) as job:
        assert (job.status(seconds=120), job.left()) == (FAILED, [])
        told = (
            rf"rank 1 \(\S+, pid {job.pid(1)}\) has not reached it; it has been in describe of step"
            r" 3 for \d+ s"
        )
        # Both say so, and the stuck one where it stands.
        assert len(re.findall(told, job.said)) == 2, job.said
        assert "time.sleep(600)" in job.said


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named_on_all_others(tmp_path):
    with started(launcher(ranks(3), "absent", tmp_path), tmp_path) as job:
        assert (job.status(seconds=120), job.left()) == (FAILED, [])
        assert (
            len(
                re.findall(
                    r"rank 1 of 3 did not join within 5 s; those that did: rank 0 \(", job.said
                )
            )
            == 2
        )


def test_hosts_that_expect_other_numbers_of_ranks_are_told_both():
    store = HashStore()
    first = in_daemon(lambda: gather_members(store, RankProcess(0), 2, 9, 1e9), "a test")
    with pytest.raises(
        DistapError, match=r"rank 1 \(.* as one of 3 ranks, rank 0 \(.* as one of 2"
    ):
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
        for one in watched:
            with one.collective("barrier"):
                pass
    for one in watched:
        one.stop()
    assert set(store.requests) == {"set", "check", "add"}


def test_the_farewell_of_a_mistake_tells_the_others_not_to_start_again():
    for error, status in ((DistapError("no such data"), MISTAKE), (KeyError("a fault"), FAILED)):
        store = CountingStore()
        watchdog(store, 1, 2).stop(error)
        told = json.loads(store.get("beat/1"))
        assert told["status"] == status and told["left"].startswith(type(error).__name__)


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
