"""Count bytes and retries of reading, for the metrics."""

import os
from operator import add
from typing import NamedTuple


class Traffic(NamedTuple):
    read_bytes: int = 0
    retries: int = 0


class Meter:
    """Count the traffic of this process; a copy in another process, or a fork, counts separately."""

    def __init__(self) -> None:
        self._process, self._total = os.getpid(), Traffic()

    def __reduce__(self) -> tuple[type["Meter"], tuple[()]]:
        return Meter, ()

    def add(self, traffic: Traffic) -> None:
        self._total = Traffic(*map(add, self.take(), traffic))

    def take(self) -> Traffic:
        """Return the counts since the last call."""
        taken = self._total if self._process == os.getpid() else Traffic()
        self._process, self._total = os.getpid(), Traffic()
        return taken
