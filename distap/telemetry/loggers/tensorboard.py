"""TensorBoard: event files in the run folder, or anywhere that TensorBoard can write to."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from distap.storage.redact import without_secrets
from distap.telemetry.loggers.protocol import LoggedRun, Logger, Outcome

FLUSH_SECONDS = 10


@dataclass(frozen=True)
class TensorBoard:
    """Where event files go.

    Args:
        folder: a folder or a URL that TensorBoard can write to; none takes RUN/tensorboard.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    folder: str | None = None

    def prepare(self) -> None:
        """Import it."""
        importlib.import_module("torch.utils.tensorboard")

    def open(self, run: LoggedRun) -> Logger:
        """A new event file beside those of before, whose later steps it takes out of sight."""
        return _EventFiles(self.folder or str(run.folder / "tensorboard"), run)


class _EventFiles:
    def __init__(self, folder: str, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was logged of the very step that the run goes on from, such as its evaluation, stays.
        purged = run.step + 1 if run.step else 0
        self._writer = SummaryWriter(folder, purge_step=purged, flush_secs=FLUSH_SECONDS)
        recipe = without_secrets(json.dumps(run.recipe, indent=2))
        self._writer.add_text("recipe", f"```json\n{recipe}\n```", run.step)

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()
