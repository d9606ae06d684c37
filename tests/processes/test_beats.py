import json
from collections import Counter
from datetime import timedelta

from torch.distributed import HashStore

from distap.errors import FAILED, MISTAKE, DistapError
from distap.processes.meeting import Party, RankProcess
from distap.processes.watchdog import Watchdog


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
