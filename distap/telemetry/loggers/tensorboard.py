"""Log to event files of TensorBoard."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from distap.telemetry.loggers.loggers import LoggedRun, Outcome

FLUSH_SECONDS = 10


@dataclass
class TensorBoard:
    """Log to event files in RUN/tensorboard: a recipe's `loggers.tensorboard`, which has no keys."""

    def prepare(self) -> None:
        for module in ("tensorboard", "torch.utils.tensorboard"):
            importlib.import_module(module)

    def open(self, run: LoggedRun) -> None:
        """Open a new event file, which hides later steps of earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        # Figures of the step that the run goes on from, such as its evaluation, stay.
        purged = run.step + 1 if run.step else 0
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=purged, flush_secs=FLUSH_SECONDS)
        self._writer.add_text("recipe", f"```json\n{json.dumps(run.recipe, indent=2)}\n```", run.step)

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()
