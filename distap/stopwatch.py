"""Time the stages of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function


class Stopwatch:
    """Seconds by stage. Time inside an inner stage counts only for the inner one.

    Work that a stage queues on the device counts for it. Only the outermost stage waits for the
    device, at its begin and end; an inner one would keep the device from working while the host
    prepares its next work. Inner stages that are part of the outer are timed by the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device if device is not None and device.type != "cpu" else None
        self._module = torch.get_device_module(device)
        self._inside = 0.0  # seconds of inner stages since the current stage began
        self._depth = 0
        self._on_device: list[tuple[str, Any, Any]] = []  # stages that events begin and end

    @contextmanager
    def stage(self, name: str, part_of_outer: bool = False) -> Iterator[None]:
        """Count the enclosed seconds for `name`; if `part_of_outer`, for the outer stage too."""
        if part_of_outer and self._device is not None and self._depth:
            begin = self._module.Event(enable_timing=True)
            end = self._module.Event(enable_timing=True)
            begin.record(self._module.current_stream(self._device))
            try:
                yield
            finally:
                end.record(self._module.current_stream(self._device))
                self._on_device.append((name, begin, end))
            return
        outer_inside = self._inside
        self._inside = 0.0
        started = self._now()
        self._depth += 1
        try:
            with record_function(name):  # names the stage in a profiler's trace
                yield
        finally:
            self._depth -= 1
            elapsed = self._now() - started
            self.seconds[name] += elapsed - self._inside
            self._inside = outer_inside + (self._inside if part_of_outer else elapsed)

    def _now(self) -> float:
        if self._device is not None and self._depth == 0:
            self._module.synchronize(self._device)
            while self._on_device:
                name, begin, end = self._on_device.pop()
                self.seconds[name] += begin.elapsed_time(end) / 1000
        return time.perf_counter()
