"""Log to an MLflow tracking server."""

import importlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distap.registry import by_path
from distap.telemetry.loggers.loggers import LoggedRun, Outcome

STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass
class MLflow:
    """Log to the MLflow server at MLFLOW_TRACKING_URI: a recipe's `loggers.mlflow`, which has no keys.

    Credentials come from MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD. The experiment is MLFLOW_EXPERIMENT_NAME,
    or `distap`. The id of the run stays in RUN/loggers/mlflow.
    """

    def prepare(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report to its maker
        # MLflow's own waits are two minutes, seven times, and a request for each line.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "5")
        importlib.import_module("mlflow")
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it logs every retry of a request

    def open(self, run: LoggedRun) -> None:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = client = importlib.import_module("mlflow.tracking").MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "distap")
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        self._sent: list[Any] = []  # lines whose outcome is not known yet
        self._id = run.kept_id("mlflow", lambda: client.create_run(experiment, run_name=run.id).info.run_id)
        client.update_run(self._id, status="RUNNING")
        known = client.get_run(self._id).data.params  # which MLflow cannot change
        params = [
            self._entities.Param(_allowed(name), value if isinstance(value, str) else json.dumps(value))
            for name, value in by_path(run.recipe, ".")
            if _allowed(name) not in known
        ]
        client.log_batch(self._id, params=params, synchronous=True)

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        at = round(time * 1000)
        metrics = [self._entities.Metric(_allowed(name), value, at, step) for name, value in figures.items()]
        self._sent.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, STATUS[outcome])  # once the queue is empty
        for line in self._sent:
            line.wait()  # raises if the server did not take it


def _allowed(name: str) -> str:
    """Replace characters that MLflow rejects: `mAP@R` becomes `mAP_at_R`."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"), flags=re.ASCII)
