"""Count bytes and retries of reading, for the metrics."""

import os
from typing import NamedTuple


class Traffic(NamedTuple):
    read_bytes: int = 0
    retries: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(*(mine + others for mine, others in zip(self, other, strict=True)))


class Meter:
    """Count the traffic of this process; a copy in another process, or a fork, counts separately."""

    def __init__(self) -> None:
        self._process, self._total = os.getpid(), Traffic()

    def __reduce__(self) -> tuple[type["Meter"], tuple[()]]:
        return Meter, ()

    def add(self, traffic: Traffic) -> None:
        self._total = self.take().plus(traffic)

    def take(self) -> Traffic:
        """Return the counts since the last call."""
        taken = self._total if self._process == os.getpid() else Traffic()
        self._process, self._total = os.getpid(), Traffic()
        return taken
