from collections import Counter
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from distap.processes.beats import LEADER, NOTED, Beats


class CountingStore:
    """A store that counts the requests of each kind."""

    def __init__(self):
        self.requests = Counter()
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=1))

    def __getattr__(self, name):
        def request(*arguments):
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return request


def said(number, **others):
    return {"beat": number, "activity": "gather", "seconds": 1.0, "begun": {"": number}, "waiting": None, **others}


def parties(size):
    store = CountingStore()
    return store, [Beats(rank, size, silence=60.0) for rank in range(size)]


def everyone_says(store, beats, number, **exceptions):
    for rank in reversed(range(len(beats))):  # the leader last, who reads them
        beats[rank].say(store, exceptions.get(f"of_{rank}", said(number)))


@pytest.mark.parametrize("size", [2, 32, 256])
def test_a_round_costs_each_rank_the_same_requests_however_many_ranks_want_to_know(size):
    store, beats = parties(size)
    everyone_says(store, beats, 1)
    store.requests.clear()
    everyone_says(store, beats, 2)
    for one in beats:
        one.listen(store)
    assert store.requests == {"set": size + 1, "multi_get": 1, "check": size - 1, "get": size - 1}


def test_nobody_is_of_note_while_all_go_on():
    store, beats = parties(5)
    for number in range(3):
        everyone_says(store, beats, number)
    beats[3].listen(store)
    assert list(beats[3].known()) == [LEADER]
    assert not any(beats[3].left())


def test_every_rank_learns_who_left_who_is_silent_and_who_is_behind():
    store, beats = parties(8)
    everyone_says(store, beats, 6)
    beats[LEADER].others[5].heard -= 100
    changes = {"of_1": said(6), "of_2": said(7, left="finished"), "of_5": said(6)}
    everyone_says(store, beats, 7, **changes)
    for rank in (3, 5, 7):
        beats[rank].listen(store)
        known = beats[rank].known()
        assert list(known) == sorted({LEADER, 1, 2, 5} - {rank})
        assert known[2].said["left"] == "finished"
        assert known[1].is_behind("", 7)
        assert not known[2].is_behind("", 7)
    assert any(beats[7].left())


def test_a_silent_leader_is_named_alone_since_what_it_wrote_is_old():
    store, beats = parties(4)
    everyone_says(store, beats, 5, of_2=said(4))
    beats[3].listen(store)
    assert list(beats[3].known()) == [LEADER, 2]
    beats[3].others[LEADER].heard -= 100
    beats[3].listen(store)  # nothing new
    assert list(beats[3].known()) == [LEADER]
    everyone_says(store, beats, 6)
    beats[3].listen(store)
    assert list(beats[3].known()) == [LEADER]


def test_the_leader_names_those_that_left_before_those_that_are_behind_if_there_are_too_many():
    store, beats = parties(2 * NOTED)
    behind = {f"of_{rank}": said(8) for rank in range(1, 2 * NOTED - 3)}
    everyone_says(store, beats, 9, **behind, of_126=said(9, left="an error"))
    beats[127].listen(store)
    assert beats[127].is_cut
    assert len(beats[127].others) == NOTED + 1
    assert beats[127].others[126].has_left
