"""The loggers of a run, together."""

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from distap.errors import DistapError
from distap.telemetry.loggers.outlet import Outlet
from distap.telemetry.loggers.protocol import LoggedRun, LoggerSettings, Outcome

FAILED_SECONDS = 3.0  # to close in after a failure, of which the other ranks hear only when this one leaves


def refuse_unusable(chosen: Mapping[str, LoggerSettings], is_first: bool) -> None:
    """Refuse loggers that cannot work, before training starts.

    Args:
        chosen: by name.
        is_first: whether this is rank 0, which imports them as well.
    Raises:
        DistapError: a package is missing, or a person must mend something else.
    """
    for name, settings in chosen.items():
        missing = f"loggers.{name}: the package {name} is missing; pip install 'distap[{name}]', or leave it out"
        if importlib.util.find_spec(name) is None:
            raise DistapError(missing)
        if is_first:
            try:
                settings.prepare()
            except ImportError as error:
                raise DistapError(f"{missing} ({error})") from error


class Loggers:
    """Open while it is entered; used on rank 0.

    Args:
        chosen: by name, found usable.
        run: what they log.
        lines: that may wait for each.
        close_seconds: that all together have at the end.
        count_lost: is called with the logger's name for each line that is lost.
    """

    def __init__(
        self,
        chosen: Mapping[str, LoggerSettings],
        run: LoggedRun,
        lines: int,
        close_seconds: float,
        count_lost: Callable[[str], None],
    ) -> None:
        self._chosen, self._run, self._lines = chosen, run, lines
        self._close_seconds, self._count_lost = close_seconds, count_lost
        self._outlets: list[Outlet] = []
        self._step = run.step

    def __enter__(self) -> "Loggers":
        self._outlets = [
            Outlet(name, settings, self._run, self._lines, partial(self._count_lost, name))
            for name, settings in self._chosen.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome: Outcome = "stopped"
        if kind is not None:
            outcome = "failed"
        elif self._step >= self._run.steps:
            outcome = "finished"
        seconds = min(self._close_seconds, FAILED_SECONDS) if kind is not None else self._close_seconds
        deadline = time.monotonic() + seconds
        for outlet in self._outlets:
            outlet.begin_to_close(outcome)
        for outlet in self._outlets:
            outlet.finish(max(0.0, deadline - time.monotonic()))

    def log(self, entry: Mapping[str, Any]) -> None:
        """Take over a line of the run's log; it has `step` and `time`."""
        self._step = entry["step"]
        figures = figures_of({key: value for key, value in entry.items() if key not in ("step", "time")})
        for outlet in self._outlets:
            outlet.log(entry["step"], entry["time"], figures)


def figures_of(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a line, nested ones by their path."""
    figures: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            figures |= figures_of(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            figures[prefix + key] = float(value)
    return figures
