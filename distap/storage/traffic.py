"""Count the bytes, retries and cache requests of reading, for the metrics."""

import os
import threading
from typing import NamedTuple


class Traffic(NamedTuple):
    read_bytes: int = 0
    retries: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(*(mine + others for mine, others in zip(self, other, strict=True)))


class Meter:
    """Count traffic from any thread; a copy in another process counts for itself."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._total = Traffic()

    def __reduce__(self) -> tuple[type["Meter"], tuple[()]]:
        return Meter, ()

    def add(self, traffic: Traffic) -> None:
        with self._own_lock():
            self._total = self._total.plus(traffic)

    def take(self) -> Traffic:
        """Return what was counted since the last call."""
        with self._own_lock():
            taken, self._total = self._total, Traffic()
        return taken

    def _own_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # another thread may have held the lock at the moment of the fork
            self._process, self._lock = os.getpid(), threading.Lock()
            self._total = Traffic()
        return self._lock
