"""Where the seconds of a step go."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Stopwatch:
    """Seconds by stage; time inside an inner stage counts for the inner one alone.

    Only the outermost stage waits for the device, at its begin and its end: inner ones would keep it from working
    while the host prepares what comes next. An inner one that is part of the outer is timed by the device itself.

    Args:
        device: whose queued work counts for the stage that queued it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device if device is not None and device.type == "cuda" else None
        self._inside = 0.0  # seconds of inner stages since the present stage began
        self._depth = 0
        self._on_device: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str, part_of_outer: bool = False) -> Iterator[None]:
        """Count the enclosed seconds for `name`; with `part_of_outer`, for the enclosing stage as well."""
        if part_of_outer and self._device is not None and self._depth:
            with self._timed_on_device(name):
                yield
            return
        outer_inside, self._inside = self._inside, 0.0
        started = self._now()
        self._depth += 1
        try:
            with record_function(name):  # its name in a trace, where one is taken
                yield
        finally:
            self._depth -= 1
            elapsed = self._now() - started
            self.seconds[name] += elapsed - self._inside
            self._inside = outer_inside + (self._inside if part_of_outer else elapsed)

    def move(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere for `name` instead of the present stage, in which they passed."""
        self.seconds[name] += seconds
        self._inside += seconds

    def _now(self) -> float:
        if self._device is not None and self._depth == 0:
            torch.cuda.synchronize(self._device)
            while self._on_device:
                name, begin, end = self._on_device.pop()
                self.seconds[name] += begin.elapsed_time(end) / 1000
        return time.perf_counter()

    @contextmanager
    def _timed_on_device(self, name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        try:
            yield
        finally:
            end.record(torch.cuda.current_stream(self._device))
            self._on_device.append((name, begin, end))
