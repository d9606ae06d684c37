"""Where the seconds of a step go."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds by stage; time inside an inner stage counts for the inner one alone.

    Args:
        synchronize: waits for the device, so that queued work counts for the stage that queued it.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._synchronize = synchronize
        self._inside = 0.0  # seconds of inner stages since the present stage began

    @classmethod
    def of(cls, device: torch.device) -> "Stopwatch":
        """A stopwatch that is honest about the queue of this device."""
        return cls(torch.cuda.synchronize) if device.type == "cuda" else cls()

    @contextmanager
    def stage(self, name: str, part_of_outer: bool = False) -> Iterator[None]:
        """Count the enclosed seconds for `name`; with `part_of_outer`, for the enclosing stage as well."""
        outer_inside, self._inside = self._inside, 0.0
        started = self._now()
        try:
            yield
        finally:
            elapsed = self._now() - started
            self.seconds[name] += elapsed - self._inside
            self._inside = outer_inside + (self._inside if part_of_outer else elapsed)

    def move(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere for `name` instead of the present stage, in which they passed."""
        self.seconds[name] += seconds
        self._inside += seconds

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()
