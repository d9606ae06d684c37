"""How trainings went: curves over their steps and where their seconds went, of one run or several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distap.pages.charts import MOST_POINTS, Series, line_chart, percent, plain, stacked_bars, stacked_rows
from distap.pages.markup import figures, note, table

STAGES = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")
CURVES = {
    "images_per_second": ("Images a second, all ranks", "images / s"),
    "learning_rate": ("Learning rate", "learning rate"),
    "gradient_norm": ("Norm of the gradient", "norm"),
    "replay_drift": ("Replay drift, between an image's two descriptors", "distance"),
}


@dataclass(frozen=True)
class RunLines:
    """Lines of a run's log."""

    name: str
    steps: Sequence[dict[str, Any]]
    validations: Sequence[dict[str, Any]]  # step 0 is before training


def curves(runs: Sequence[RunLines]) -> str:
    """The section on training: a chart a figure, with a line a run."""
    empty = [run.name for run in runs if not run.steps]
    said = "".join(note(f"{name}: no training step has been logged.") for name in empty)
    if len(empty) == len(runs):
        return f"<h2>Training</h2>{said}"
    charts = [
        ("Loss of the global batch", line_chart(_series(runs, "loss"), "loss")),
        *_average_precision(runs),
        *(
            (title, line_chart(_series(runs, name), label, plain, from_zero=True))
            for name, (title, label) in CURVES.items()
        ),
    ]
    most = max(len(run.steps) for run in runs)
    thinned = note(f"{most:,} steps: each point is the mean of an interval.") if most > MOST_POINTS else ""
    return f"<h2>Training</h2>{said}{figures(charts)}{thinned}"


def _average_precision(runs: Sequence[RunLines]) -> list[tuple[str, str]]:
    of_batches = _series(runs, "batch_mAP")
    of_validation = [
        Series(
            run.name, [(float(entry["step"]), _number(entry["validation"]["mAP"])) for entry in run.validations], True
        )
        for run in runs
    ]
    if len(runs) == 1:
        both = [Series("batch (1 - loss)", of_batches[0].points)]
        both.append(Series("validation", of_validation[0].points, marked=True))
        charts = {"Mean Average Precision": [each for each in both if _is_drawn(each)]}
    else:
        # A run that has no line keeps its place, so that a run looks the same in every chart.
        charts = {"mAP of the batches (1 - loss)": of_batches, "mAP of the validation set": of_validation}
    return [
        (title, line_chart(series, "mAP", percent)) for title, series in charts.items() if any(map(_is_drawn, series))
    ]


def _is_drawn(series: Series) -> bool:
    return any(math.isfinite(y) for _, y in series.points)


def seconds(runs: Sequence[RunLines]) -> str:
    """The section on time: the stages of a step, in seconds of rank 0."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return ""
    per_step = {run.name: _stages(run) for run in runs}
    used = [stage for stage in STAGES if any(of_run[stage] for of_run in per_step.values())]
    rows = {name: {stage: of_run[stage] for stage in used} for name, of_run in per_step.items()}
    whole = {name: sum(of_run.values()) for name, of_run in rows.items()}
    if len(runs) == 1:
        run = runs[0]
        layers = {stage: [_number(entry["seconds"].get(stage, 0.0)) for entry in run.steps] for stage in used}
        chart = stacked_bars([float(entry["step"]) for entry in run.steps], layers, "seconds")
        charts = [("Seconds of a step by stage, rank 0", chart)]
    else:
        charts = [("Seconds of a step by stage, rank 0, mean", stacked_rows(rows, "seconds a step"))]
    heading = ["stage", *(f"{run.name}, seconds a step".removeprefix(", ") for run in _named(runs))]
    cells = [[stage, *(_part(rows[name][stage], whole[name]) for name in rows)] for stage in used]
    cells.append(["all", *(_part(whole[name], whole[name]) for name in rows)])
    charts.append(("Means over the steps", table(heading, cells)))
    outside = "".join(
        note(f"{run.name}: {text}".removeprefix(": "))
        for run, text in zip(_named(runs), map(_outside, runs), strict=True)
    )
    return f"<h2>Where the time goes</h2>{figures(charts)}{outside}"


def _outside(run: RunLines) -> str:
    whole = sum(_number(entry["seconds"]["step"]) for entry in run.steps)
    network = sum(_number(entry["seconds"]["network"]) for entry in run.steps)
    share = 100 * (1 - network / whole) if whole else math.nan
    return f"{share:.1f}% of a step is outside the network's own forward and backward."


def _stages(run: RunLines) -> dict[str, float]:
    """Mean seconds of each stage."""
    return {
        stage: sum(_number(entry["seconds"].get(stage, 0.0)) for entry in run.steps) / len(run.steps)
        for stage in STAGES
    }


def _named(runs: Sequence[RunLines]) -> list[RunLines]:
    """A run alone needs no name."""
    return [RunLines("", run.steps, run.validations) for run in runs] if len(runs) == 1 else list(runs)


def _part(seconds: float, whole: float) -> str:
    share = f"{100 * seconds / whole:.1f}" if whole else "–"
    return f"{seconds:.3f} ({share}%)"


def _series(runs: Sequence[RunLines], name: str) -> list[Series]:
    return [
        Series(run.name, [(float(entry["step"]), _number(entry.get(name))) for entry in run.steps]) for run in runs
    ]


def _number(value: float | None) -> float:
    """The run's log writes numbers that are not finite as null."""
    return math.nan if value is None else float(value)
