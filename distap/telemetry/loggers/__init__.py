"""Where a run's figures go beside Prometheus and the run's own log: TensorBoard, Weights & Biases, MLflow.

Each is a frozen dataclass of its settings in a file of its own, and an extra of the same name to install; a new one
is one more file and one line in LOGGERS. All work on rank 0, each in a thread of its own behind a bounded queue
(outlet.py): one that is slow or broken loses lines, which are counted, and never holds the training up.

The figures are those of metrics.jsonl, under the same names; nested ones are joined by a slash, such as
`seconds/describe` and `validation/mAP`. One that is not finite is left out.
"""

from distap.telemetry.loggers.loggers import Loggers, refuse_unusable
from distap.telemetry.loggers.mlflow import MLflow
from distap.telemetry.loggers.protocol import LoggedRun, Logger, LoggerSettings
from distap.telemetry.loggers.tensorboard import TensorBoard
from distap.telemetry.loggers.weights_and_biases import WeightsAndBiases

LOGGERS: dict[str, type[LoggerSettings]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}

__all__ = [
    "LOGGERS",
    "LoggedRun",
    "Logger",
    "LoggerSettings",
    "Loggers",
    "MLflow",
    "TensorBoard",
    "WeightsAndBiases",
    "refuse_unusable",
]
