"""Charts of how trainings went: curves over their steps, and the seconds of a step by stage."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distap.evaluation.saved import Retrieved, SavedEvaluation
from distap.pages.charts import Chart, Series, line_chart, percent, stacked_bars
from distap.pages.runs import Run

STAGES = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")
CURVES = {
    "images_per_second": ("Images a second, all ranks", "images / s"),
    "learning_rate": ("Learning rate", "learning rate"),
    "gradient_norm": ("Norm of the gradient", "norm"),
    "replay_drift": ("Replay drift, between an image's two descriptors", "distance"),
}


def training_charts(runs: Sequence[Run]) -> dict[str, Chart | None]:
    """Curves over the training steps by title, with a line for each run."""

    def over_steps(name: str) -> list[Series]:
        return [Series(run.name, [(entry["step"], entry.get(name)) for entry in run.steps]) for run in runs]

    batches = over_steps("batch_mAP")
    validations = [
        Series(run.name, [(entry["step"], entry["validation"]["mAP"]) for entry in run.validations], marked=True)
        for run in runs
    ]
    if len(runs) == 1:
        both = [replace(batches[0], name="batch (1 - loss)"), replace(validations[0], name="validation")]
        drawn = [each for each in both if any(y is not None for _, y in each.points)]
        precision = {"Mean Average Precision": drawn}
    else:
        precision = {"mAP of the batches (1 - loss)": batches, "mAP of the validation set": validations}
    charts = {title: line_chart(series, "mAP", percent) for title, series in precision.items()}
    return {
        "Loss of the global batch": line_chart(over_steps("loss"), "loss"),
        **{title: chart for title, chart in charts.items() if chart},  # not every loss is one of AP
        **{title: line_chart(over_steps(name), label, from_zero=True) for name, (title, label) in CURVES.items()},
    }


def stage_seconds(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Mean seconds of each stage of a step on rank 0, for each run; stages that no run has are left out."""
    means = {
        run.name: {name: sum(e["seconds"].get(name, 0.0) for e in run.steps) / len(run.steps) for name in STAGES}
        for run in runs
        if run.steps
    }
    used = [stage for stage in STAGES if any(of_run[stage] for of_run in means.values())]
    return {name: {stage: of_run[stage] for stage in used} for name, of_run in means.items()}


def seconds_chart(run: Run, stages: Sequence[str]) -> Chart | None:
    """The seconds of each step, stage on stage."""
    layers = {stage: [entry["seconds"].get(stage, 0.0) for entry in run.steps] for stage in stages}
    return stacked_bars([entry["step"] for entry in run.steps], layers, "seconds")


def precision_charts(
    evaluations: dict[str, SavedEvaluation], retrieved: dict[str, Retrieved]
) -> dict[str, Chart | None]:
    """Precision over recall, and the share of queries that reach an AP, with a line for each network."""
    precision = [Series(name, list(enumerate(each.precision_at_recall))) for name, each in evaluations.items()]
    reached = [Series(name, list(enumerate(_reached(each)))) for name, each in retrieved.items()]
    charts = {
        "Precision over recall": line_chart(precision, "precision", percent, True, "recall, %"),
        "Queries that reach an AP": line_chart(reached, "share of queries", percent, True, "AP at least, %"),
    }
    return {title: chart for title, chart in charts.items() if chart}


def _reached(retrieved: Retrieved) -> list[float]:
    """Share of the queries whose AP is at least 0, 0.01 ... 1."""
    ascending = np.sort(retrieved.average_precision[retrieved.first_positive > 0])
    if not len(ascending):
        return []
    return list(1 - np.searchsorted(ascending, np.arange(101) / 100) / len(ascending))
