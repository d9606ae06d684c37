"""Measure how long each phase of a start takes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

# Environment variables of a launcher: when it began to start ranks, and its job of several hosts.
STARTED, JOB = "DISTAP_STARTED", "DISTAP_JOB"


class Startup:
    """Seconds by phase of a start, since the launcher's start, this process's (without launcher) or `started`.

    The phases are `launcher` (with the hosts finding each other), `imports`, `joining` (of the ranks), `data`,
    `network` (with its weights and engine), `checkpoint`, `evaluation`, and `first step`.
    """

    def __init__(self, started: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        started = process_started() if started is None else started
        launched = float(os.environ.get(STARTED, started))
        if launched < started:
            self.seconds["launcher"] = started - launched
        self._last = started

    def reached(self, phase: str) -> None:
        """End a phase; the seconds since the end of the previous phase belong to it."""
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def summary(self, first_step: Mapping[str, float]) -> str:
        """Describe in one line how long each phase of the start took, and the longest stages of the first step."""
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        longest = sorted(first_step.items(), key=lambda stage: -stage[1])[:3]
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in longest)
        return f"the first step was done {sum(self.seconds.values()):.1f} s after the start: {phases} ({stages})"


def process_started() -> float:
    """Return when this process was started, in seconds since the epoch."""
    try:
        # Field 22 counts clock ticks since boot; the second one is the command, which may contain anything.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time() - time.process_time()
    return time.time() - age
