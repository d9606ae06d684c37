"""Log to an MLflow tracking server."""

import importlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distap.storage.atomic import write_whole
from distap.storage.redact import without_secrets
from distap.telemetry.loggers.protocol import LoggedRun, Logger, Outcome

RUN_TAG = "distap.run"
PARAMS_AT_ONCE = 100  # a server takes no more
LONGEST_PARAM = 6000
STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(frozen=True)
class MLflow:
    """Keys of `loggers.mlflow`; credentials come from MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD.

    Args:
        tracking_uri: the server; None takes MLFLOW_TRACKING_URI.
        experiment: the run's experiment; created if it is missing.
        id: the run to go on with; None creates one and keeps its id in RUN/loggers/mlflow. If that file is lost, a
            run that goes on from a checkpoint is found by its tag `distap.run`.
    """

    tracking_uri: str | None = None
    experiment: str = "distap"
    id: str | None = None

    def prepare(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report to its maker
        importlib.import_module("mlflow.tracking")
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it logs every retry of a request

    def open(self, run: LoggedRun) -> Logger:
        """Create the run, or go on with it."""
        return _Run(self, run)


class _Run:
    def __init__(self, settings: MLflow, run: LoggedRun) -> None:
        self._mlflow: Any = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(settings.tracking_uri)
        self._experiment = self._experiment_called(settings.experiment)
        path = run.notes / "mlflow"
        self._id = settings.id or (path.read_text() if path.exists() else None) or self._found(run)
        if self._id is None:
            tags = {RUN_TAG: run.id}
            self._id = self._client.create_run(self._experiment, tags=tags, run_name=run.id).info.run_id
        if settings.id is None:
            write_whole(path, self._id)
        self._client.update_run(self._id, status="RUNNING")
        self._log_recipe(run.recipe)

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        at = round(time * 1000)
        metrics = [self._mlflow.Metric(_allowed(name), value, at, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics, synchronous=True)

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, STATUS[outcome])

    def _experiment_called(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _found(self, run: LoggedRun) -> str | None:
        if run.step == 0:
            return None  # another training may have used this name
        runs = self._client.search_runs([self._experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _log_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Log the recipe as params; MLflow cannot change a param that the run has already."""
        known = self._client.get_run(self._id).data.params
        params = [
            self._mlflow.Param(name, value[:LONGEST_PARAM])
            for name, value in _params_of(recipe).items()
            if name not in known
        ]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE], synchronous=True)


def _params_of(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    params: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            params |= _params_of(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            params[_allowed(prefix + key)] = without_secrets(text)
    return params


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not take: `mAP@R` becomes `mAP_at_R`."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"), flags=re.ASCII)
