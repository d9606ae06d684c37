"""What ranks say of themselves, once a second, through the store: O(W) requests, however many ranks want to know.

beat/R    what rank R does
of note   the ranks that another may wait for, by rank 0, which alone reads all beats, in one request
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

LEADER = 0  # the rank that reads what all say
NOTED = 64  # ranks of which it tells the others
OF_NOTE = "of note"
Said = dict[str, Any]


@dataclass
class Beat:
    """The last message of another rank, and when it last changed."""

    said: Said = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)

    @property
    def has_left(self) -> bool:
        return "left" in self.said

    def is_behind(self, channel: str, number: int) -> bool:
        """Tell whether the rank has not yet begun a channel's collective of this number."""
        return int(self.said.get("begun", {}).get(channel, 0)) < number


class Beats:
    """The beats of others, as far as this rank needs them: the leader all, the rest those of note."""

    def __init__(self, rank: int, size: int, silence: float) -> None:
        """`silence` is in seconds, after which a rank may be gone."""
        self.silence = silence
        self.others = {other: Beat() for other in (range(size) if rank == LEADER else [LEADER]) if other != rank}
        self.is_cut = False  # more ranks are of note than the leader told
        self._rank, self._is_begun = rank, False

    def say(self, store: Store, said: Said) -> None:
        """Write this rank's beat; the leader reads the others' too, and writes down those of note."""
        store.set(_key(self._rank), json.dumps(said))
        if self._rank != LEADER or not self.others:
            return
        if not self._is_begun:
            for rank in self.others:  # to ask for a key that is not there would wait for it
                store.compare_set(_key(rank), "", "{}")
            self._is_begun = True
        beats = store.multi_get(list(map(_key, self.others)))
        now = time.monotonic()
        for other, beat in zip(self.others.values(), map(json.loads, beats), strict=True):
            if beat != other.said:
                other.said, other.heard = beat, now
        ranks = self._of_note(said, now)
        told = [(rank, self.others[rank].said, now - self.others[rank].heard) for rank in ranks[:NOTED]]
        store.set(OF_NOTE, json.dumps({"ranks": [(LEADER, said, 0.0), *told], "is_cut": len(ranks) > NOTED}))

    def _of_note(self, said: Said, now: float) -> list[int]:
        """Ranks that left, then those that are silent, then those that are behind in some channel."""
        begun: dict[str, int] = dict(said["begun"])
        for other in self.others.values():
            for channel, number in other.said.get("begun", {}).items():
                begun[channel] = max(number, begun.get(channel, 0))

        def order(rank: int) -> int | None:
            other = self.others[rank]
            is_behind = any(other.is_behind(channel, number) for channel, number in begun.items())
            of_note = (other.has_left, now - other.heard > self.silence, is_behind)
            return of_note.index(True) if any(of_note) else None

        orders = {rank: order(rank) for rank in self.others}
        return sorted((rank for rank in orders if orders[rank] is not None), key=lambda rank: orders[rank] or 0)

    def listen(self, store: Store) -> None:
        """Read what the leader wrote, unless this is the leader."""
        if self._rank == LEADER or not store.check([OF_NOTE]):
            return
        told = json.loads(store.get(OF_NOTE))
        now = time.monotonic()
        others = {rank: Beat(said, now - silent) for rank, said, silent in told["ranks"] if rank != self._rank}
        if others[LEADER].said != self.others[LEADER].said:
            self.others, self.is_cut = others, told["is_cut"]

    def known(self) -> dict[int, Beat]:
        """The beats that can be believed: while the leader is silent, what it wrote of the rest is old."""
        others = self.others
        if LEADER in others and time.monotonic() - others[LEADER].heard > self.silence:
            return {LEADER: others[LEADER]}
        return dict(sorted(others.items()))

    def left(self) -> list[bool]:
        return [other.has_left for other in self.others.values()]

    def forgive(self, seconds: float) -> None:
        """This process was stopped for a while: nobody else was silent in that time."""
        for other in self.others.values():
            other.heard += seconds


def _key(rank: int) -> str:
    return f"beat/{rank}"
