"""Write and read a run's log, metrics.jsonl, and pass its figures on to TensorBoard, Weights &
Biases or others.

The log has one JSON object for each step or evaluation. Loggers get its figures under the same
names; nested names are joined by a slash (`seconds/describe`, `validation/mAP`), and figures that
are not finite are left out. Each package sends what it is given from a queue of its own. An error
of a logger costs a line and a warning, never the training.
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
    """Append an entry to a file of JSON lines; warn if the line is lost, for example on a full
    disk.
    """
    try:
        with path.open("ab") as file:  # NaN and infinity are null there, since JSON has neither
            file.write(to_json(entry, inf_nan_mode="null") + b"\n")
    except OSError as error:
        logger.warning("%s: a line is lost: %s", path, error)


def cut_run_log(folder: Path, step: int) -> None:
    """Remove lines of steps after `step` from the log of a run that continues from there, and
    unreadable lines.
    """
    path = folder / RUN_LOG
    if path.exists():
        write_whole(
            path,
            b"".join(to_json(entry) + b"\n" for entry in _entries(path) if entry["step"] <= step),
        )


def log_start(folder: Path, step: int, **about: Any) -> None:
    """Append when, where and with which versions a training starts from `step` to
    folder/starts.jsonl.
    """
    import torch  # here, since a page about a run needs none

    versions = {
        "distap": distap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    own = {"step": step, "time": time.time(), "host": socket.gethostname()}
    append_line(folder / STARTS_LOG, {**own, **versions, **about})


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read the starts of a run that `log_start` logged; return nothing for a run older than this
    log.
    """
    path = folder / STARTS_LOG
    return list(_entries(path)) if path.is_file() else []


def read_run_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log."""
    path = folder / RUN_LOG
    if not path.is_file():
        raise DistapError(f"{path}: no such run log; a training writes it into its run folder")
    return list(_entries(path))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log; warn of damaged lines, but not of a last one that an interruption
    cut short.
    """
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
    """Interface of a logger of figures, which is also what a recipe chooses; its fields are its
    keys.

    Training waits for its calls, so that those have to queue what they send.
    """

    def prepare(self) -> None:
        """Import packages and check settings before training, offline; raise ImportError if a
        package is missing.
        """

    def open(self, run: LoggedRun) -> None:
        """Begin to log a run, or continue it."""

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Log finite figures by name, at a Unix time in seconds; a step may have several lines."""

    def close(self, failed: bool) -> None:
        """Flush everything; no further call follows. `failed` tells whether an error has ended the
        training.
        """


def prepare_loggers(chosen: Mapping[str, Logger]) -> None:
    """Import the packages of loggers, by name; raise a DistapError if one is missing or cannot
    work.
    """
    for name, one in chosen.items():
        try:
            one.prepare()
        except ImportError as error:
            package = f"'distap[{name}]'" if name in REGISTRY["logger"] else "it"
            problem = (
                f"the package {error.name} is missing"
                if error.name
                else "its package cannot be imported"
            )
            remedy = f"pip install {package}, or leave the logger out ({error})"
            raise DistapError(f"loggers.{name}: {problem}; {remedy}") from error


@contextmanager
def opened_loggers(
    chosen: Mapping[str, Logger], run: LoggedRun
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a run's loggers; yield a function that passes lines of the run's log, with `step` and
    `time`, to each.
    """
    run = replace(run, recipe=json.loads(without_secrets(json.dumps(run.recipe))))
    told: set[str] = set()

    def survives(name: str, call: Callable[..., None], *given: Any) -> bool:
        try:
            call(*given)
        except (Exception, SystemExit) as error:  # packages end the process where a key is missing
            if name not in told:  # later errors usually have the same reason
                first, _, _ = str(error).strip().partition("\n")
                reason = without_secrets(f"{type(error).__name__}: {first[:300]}")
                logger.warning("loggers.%s: figures are lost: %s; training goes on", name, reason)
            told.add(name)
            return False
        return True

    def log(entry: Mapping[str, Any]) -> None:
        figures = finite_figures(
            {key: value for key, value in entry.items() if key not in ("step", "time")}
        )
        for name, one in opened.items():
            survives(name, one.log, entry["step"], entry["time"], figures)

    opened = {name: one for name, one in chosen.items() if survives(name, one.open, run)}
    failed = True
    try:
        yield log
        failed = False
    finally:
        for name, one in opened.items():
            survives(name, one.close, failed)


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
        # the end would wait without limit
        for patience in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
            os.environ.setdefault(patience, "30")
        wandb: Any = importlib.import_module("wandb")
        # Without a key, init would ask the terminal for one.
        if os.environ.get("WANDB_MODE") != "offline" and not wandb.login(
            prompt=False, verify=False
        ):
            raise DistapError(
                "loggers.wandb: no key: set WANDB_API_KEY in the environment, or WANDB_MODE=offline"
            )

    def open(self, run: LoggedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        own_id = run.folder / "loggers" / "wandb"
        if not own_id.exists():
            write_whole(own_id, secrets.token_hex(4))
        # Send neither terminal output nor the command line, which may hold an address with a
        # secret.
        ours = wandb.Settings(
            silent=True,
            console="off",
            reinit="create_new",
            allow_val_change=True,
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "distap"),
            name=run.id,
            id=own_id.read_text(),
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
