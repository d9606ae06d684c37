"""The contract of a logger."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger logs."""

    folder: Path
    id: str
    recipe: Mapping[str, Any]  # plain nested values
    step: int  # steps behind the state that the run goes on from; figures of later steps are to be replaced
    steps: int  # of the whole run

    @property
    def notes(self) -> Path:
        """The folder where a logger keeps what it needs when the run goes on."""
        return self.folder / "loggers"


class Logger(Protocol):
    """Takes figures. An error costs the present line only; calls may block."""

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Take finite figures by name, at a Unix time in seconds; a step may have several lines."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Flush everything; this is the last call."""
        ...


class LoggerSettings(Protocol):
    """A logger's keys in the recipe."""

    def prepare(self) -> None:
        """Import packages and check settings before training starts, without using the network.

        Raises:
            DistapError: a person must mend something.
        """
        ...

    def open(self, run: LoggedRun) -> Logger:
        """Open the logger of a run, or go on with it. The thread that will use the logger calls this."""
        ...
