"""Heartbeats: what each rank reports once per second, and the faults that this shows."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from distap.processes.roll_call import RankProcess


@dataclass
class Collective:
    """A collective operation that this rank has started."""

    name: str
    channel: str
    number: int  # in its channel, the same on every rank
    since: float
    returned: bool = False
    done: torch.cuda.Event | None = None  # a GPU's collective returns before it is done

    def is_over(self) -> bool:
        return self.returned and (self.done is None or self.done.query())


@dataclass
class Heart:
    """The last heartbeat read from another rank, and the time at which it changed."""

    member: RankProcess
    said: dict[str, Any]
    changed: float

    def problem(self, collective: Collective | None, silence: float) -> str | None:
        """Return the fault of this rank; None if it is well."""
        doing, quiet = self.said.get("activity", "start"), time.monotonic() - self.changed
        for collective_name in self.said.get("waiting", ()):
            doing += f", waiting in {collective_name}"
        if "left" in self.said:
            return f"{self.member} left: {self.said['left']}"
        if quiet > silence:
            # Its own clock tells when it beat, and may be wrong: the case tells only that it has not since.
            quiet = max(quiet, time.time() - self.said.get("time", time.time()))
            return f"{self.member} has not been heard of for {quiet:.0f} s; it was in {doing}"
        if collective is not None and self.said.get("begun", {}).get(collective.channel, 0) < collective.number:
            return f"{self.member} has not reached it; it has been in {doing} for {self.said.get('seconds', 0):.0f} s"
        return None
