"""Log to event files of TensorBoard, or to Weights & Biases."""

import importlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distap.errors import DistapError
from distap.telemetry.loggers.loggers import LoggedRun

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

    def close(self, failed: bool) -> None:
        self._writer.close()


@dataclass
class WeightsAndBiases:
    """Log to Weights & Biases, with the key WANDB_API_KEY: a recipe's `loggers.wandb`, which has no keys.

    Server, user or team, project (by default `distap`) and group are WANDB_BASE_URL, WANDB_ENTITY, WANDB_PROJECT and
    WANDB_RUN_GROUP. With WANDB_MODE=offline, RUN/wandb gets files for `wandb sync`. RUN/loggers/wandb has the id.
    """

    def prepare(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report to its maker
        os.environ.setdefault("WANDB_SILENT", "true")
        for patience in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):  # the end would wait without limit
            os.environ.setdefault(patience, "30")
        wandb: Any = importlib.import_module("wandb")
        # Without a key, init would ask the terminal for one.
        if os.environ.get("WANDB_MODE") != "offline" and not wandb.login(prompt=False, verify=False):
            raise DistapError("loggers.wandb: no key: set WANDB_API_KEY in the environment, or WANDB_MODE=offline")

    def open(self, run: LoggedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        # Send neither terminal output nor the command line, which may hold an address with a secret.
        ours = wandb.Settings(
            silent=True, console="off", reinit="create_new", allow_val_change=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "distap"),
            name=run.id,
            id=run.kept_id("wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            settings=ours,
        )
        # W&B drops steps that do not grow, as a step that is done again after an interruption.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, "_timestamp": time, **figures})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
