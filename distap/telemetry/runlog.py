"""Write and read a run's log, metrics.jsonl, and pass its figures on to loggers.

The log has one JSON object for each step or evaluation. Loggers, such as TensorBoard and Weights &
Biases, get its figures under the same names; nested names are joined by a slash
(`seconds/describe`, `validation/mAP`), and figures that are not finite are left out. Each package
sends its figures from a queue of its own. An error of a logger costs a line and a warning, never
the training.
"""

import importlib
import json
import math
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import to_json

import distap
from distap.errors import DistapError, logger, without_secrets
from distap.registry import REGISTRY, by_path
from distap.storage.atomic import write_whole
from distap.storage.texts import MOST_TEXT, parsed_json

RUN_LOG = "metrics.jsonl"
STARTS_LOG = "starts.jsonl"
FLUSH_SECONDS = 10


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a file of JSON lines; warn if the line is lost, as on a full disk."""
    try:
        with path.open("ab") as file:  # NaN and infinity are null there, since JSON has neither
            file.write(to_json(entry, inf_nan_mode="null") + b"\n")
    except OSError as error:
        logger.warning("%s: a line is lost: %s", path, error)


def cut_run_log(folder: Path, step: int) -> None:
    """Remove unreadable lines, and those of steps after `step`, from a log to be continued."""
    path = folder / RUN_LOG
    if path.exists():
        lines = [to_json(entry) + b"\n" for entry in _entries(path) if entry["step"] <= step]
        write_whole(path, b"".join(lines))


def log_start(folder: Path, step: int, **facts: Any) -> None:
    """Append time, host and versions of a training's start, and `facts`, to folder/starts.jsonl."""
    import torch  # here, since a page about a run needs none

    entry = {
        "step": step,
        "time": time.time(),
        "host": socket.gethostname(),
        "user": os.environ.get("USER") or f"uid {os.getuid()}",
        "distap": distap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    append_line(folder / STARTS_LOG, entry | facts)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read the starts that `log_start` logged; a run older than this log has none."""
    path = folder / STARTS_LOG
    return list(_entries(path)) if path.is_file() else []


def read_run_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log."""
    path = folder / RUN_LOG
    if not path.is_file():
        raise DistapError(
            "telemetry.no_log", f"{path}: no such run log; a training writes it into its run folder"
        )
    return list(_entries(path))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log; warn of damaged lines, except a last one that was cut short."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_TEXT), b""), 1):
            try:
                entry = parsed_json(line)
            except ValueError:  # of JSON or of UTF-8
                entry = {}
            if isinstance(entry.get("step"), int):
                yield entry
            elif line.endswith(b"\n"):
                logger.warning("%s, line %d: damaged, and left out: %r", path, number, line[:60])


@dataclass(frozen=True)
class LoggedRun:
    """A run, as a logger needs to know it."""

    folder: Path
    id: str
    recipe: Mapping[str, Any]  # plain nested values; a logger gets them without secrets
    # steps behind the state that the run goes on from; figures of later steps are to be replaced
    step: int


class Logger(Protocol):
    """Interface of a logger of figures; its fields are the keys of its section in a recipe.

    Training waits for its calls, so that those have to queue their figures.
    """

    def prepare(self) -> None:
        """Import packages and check settings before training, offline.

        Raises:
            ImportError: a package is missing.
        """

    def open(self, run: LoggedRun) -> None:
        """Begin to log a run, or continue it."""

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Log finite figures by name, at a Unix time in seconds; a step may have several lines."""

    def close(self, failed: bool) -> None:
        """Flush everything at the end of the training, which an error has ended if `failed`."""


def prepare_loggers(chosen: Mapping[str, Logger]) -> None:
    """Import the packages of the loggers that a recipe names, and check their settings.

    Raises:
        DistapError: a package is missing, or a logger cannot work.
    """
    for name, chosen_logger in chosen.items():
        try:
            chosen_logger.prepare()
        except ImportError as error:
            package = f"'distap[{name}]'" if name in REGISTRY["logger"] else "it"
            problem = "its package cannot be imported"
            if error.name:
                problem = f"the package {error.name} is missing"
            raise DistapError(
                "package.missing",
                f"loggers.{name}: {problem}; pip install {package}, or leave the logger out"
                f" ({error})",
            ) from error


@contextmanager
def opened_loggers(
    chosen: Mapping[str, Logger], run: LoggedRun
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a run's loggers; yield a function that passes a line of the run's log to each.

    A line has a `step` and a `time`.
    """
    run = replace(run, recipe=json.loads(without_secrets(json.dumps(run.recipe))))
    failing: set[str] = set()

    def survives(name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:  # packages end the process where a key is missing
            if name not in failing:  # later errors usually have the same reason
                first = str(error).strip().partition("\n")[0]
                reason = without_secrets(f"{type(error).__name__}: {first[:300]}")
                logger.warning("loggers.%s: figures are lost: %s; training goes on", name, reason)
            failing.add(name)
            return False
        return True

    def log(entry: Mapping[str, Any]) -> None:
        figures = finite_figures(
            {key: value for key, value in entry.items() if key not in ("step", "time")}
        )
        for name, target in opened.items():
            survives(name, partial(target.log, entry["step"], entry["time"], figures))

    opened = {
        name: target for name, target in chosen.items() if survives(name, partial(target.open, run))
    }
    failed = True
    try:
        yield log
        failed = False
    finally:
        for name, target in opened.items():
            survives(name, partial(target.close, failed))


def finite_figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line; nested ones are named by path."""
    return {
        name: float(value)
        for name, value in by_path(entry, "/")
        if isinstance(value, int | float) and math.isfinite(value)
    }


@dataclass
class TensorBoard:
    """Log to event files in RUN/tensorboard: `tensorboard` in a recipe, without keys."""

    def prepare(self) -> None:
        for module in ("tensorboard", "torch.utils.tensorboard"):
            importlib.import_module(module)

    def open(self, run: LoggedRun) -> None:
        """Open a new event file, which hides later steps of earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        # Figures of the step that the run goes on from, such as its evaluation, stay.
        purged = run.step + 1 if run.step else 0
        self._writer = SummaryWriter(
            run.folder / "tensorboard", purge_step=purged, flush_secs=FLUSH_SECONDS
        )
        self._writer.add_text(
            "recipe", f"```json\n{json.dumps(run.recipe, indent=2)}\n```", run.step
        )

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self, failed: bool) -> None:
        self._writer.close()


@dataclass
class WeightsAndBiases:
    """Log to Weights & Biases, with the key WANDB_API_KEY: `wandb` in a recipe, without keys.

    Server, user or team, project (by default `distap`) and group are WANDB_BASE_URL, WANDB_ENTITY,
    WANDB_PROJECT and WANDB_RUN_GROUP. With WANDB_MODE=offline, RUN/wandb gets files for `wandb
    sync`. RUN/loggers/wandb has the id.
    """

    def prepare(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report to its maker
        os.environ.setdefault("WANDB_SILENT", "true")
        # Its defaults would let the end of a training wait without limit.
        for patience in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
            os.environ.setdefault(patience, "30")
        wandb: Any = importlib.import_module("wandb")
        # Without a key, init would ask the terminal for one.
        if os.environ.get("WANDB_MODE") != "offline" and not wandb.login(
            prompt=False, verify=False
        ):
            raise DistapError(
                "telemetry.no_key",
                "loggers.wandb: no key: set WANDB_API_KEY in the environment, or"
                " WANDB_MODE=offline",
            )

    def open(self, run: LoggedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        own_id = run.folder / "loggers" / "wandb"
        if not own_id.exists():
            write_whole(own_id, secrets.token_hex(4))
        # Its settings keep back terminal output and the command line, which may hold an address
        # with a secret.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "distap"),
            name=run.id,
            id=own_id.read_text(),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            settings=wandb.Settings(
                silent=True,
                console="off",
                reinit="create_new",
                allow_val_change=True,
                x_disable_meta=True,
            ),
        )
        # W&B drops steps that do not grow, as a step that is done again after an interruption.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, "_timestamp": time, **figures})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
