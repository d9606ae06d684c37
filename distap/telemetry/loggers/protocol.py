"""What a logger is told, and what it has to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """A run, as a logger is told of it."""

    folder: Path
    id: str
    recipe: Mapping[str, Any]  # in full, as plain values, nested
    step: int  # steps behind the state that the run goes on from; later figures of before are to be replaced
    steps: int  # that it is to have

    @property
    def notes(self) -> Path:
        """A folder for what a logger must remember when the run goes on."""
        return self.folder / "loggers"


class Logger(Protocol):
    """A place for figures. Whatever it raises costs the line in hand alone; it may block."""

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Take the figures of a step; there may be several lines of one step.

        Args:
            step: steps behind it.
            time: Unix time, seconds.
            figures: finite, by name.
        """
        ...

    def close(self, outcome: Outcome) -> None:
        """Bring everything where it belongs; nothing comes after."""
        ...


class LoggerSettings(Protocol):
    """A logger's section of the recipe."""

    def prepare(self) -> None:
        """Import what it needs, and refuse what cannot work, before training starts; the network is not to be used.

        Raises:
            DistapError: a person must mend something.
        """
        ...

    def open(self, run: LoggedRun) -> Logger:
        """The logger of a run, in which it goes on where it was left. Called in the thread that will use it."""
        ...
