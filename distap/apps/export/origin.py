"""Collect what a run recorded about a checkpoint: its recipe, data and figures."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.checkpoint.folder import Checkpoint
from distap.config.recipe import Recipe
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.saved import SavedEvaluation, folder_of_step, read_evaluation
from distap.telemetry.runlog import read_run_log


@dataclass(frozen=True)
class TrainingData:
    """The data set that a network was trained on; None if not known."""

    source: str
    fingerprint: str | None
    images: int | None
    classes: int | None


@dataclass(frozen=True)
class Origin:
    """The run behind a checkpoint."""

    checkpoint: Path
    step: int
    recipe: Recipe
    data: TrainingData
    figures: dict[str, dict[str, float]]  # of this very state by data set, the validation set first
    validation: SavedEvaluation | None  # details of the validation set's figures


def origin_of(checkpoint: Checkpoint, recipe: Recipe) -> Origin:
    """Read a checkpoint's origin from its run's folder; figures of another state are left out."""
    run = checkpoint.path.absolute().parent.parent
    score = checkpoint.manifest.score
    data = _data(recipe, checkpoint.manifest.about.get("data"))
    figures, validation = ({}, None) if score is None else _scored(run, checkpoint.step, score, recipe)
    return Origin(checkpoint.path, checkpoint.step, recipe, data, figures, validation)


def _data(recipe: Recipe, fingerprint: Any) -> TrainingData:
    source = recipe.data.train_source
    images = classes = None
    if not source.scheme:
        try:
            index = load_index(source, compare=False)
        except DistapError:
            index = None
        if index is not None and index.fingerprint == fingerprint:
            images, classes = len(index), len(set(index.label[index.label >= 0].tolist()))
    return TrainingData(str(source), None if fingerprint is None else str(fingerprint), images, classes)


def _scored(
    run: Path, step: int, score: float, recipe: Recipe
) -> tuple[dict[str, dict[str, float]], SavedEvaluation | None]:
    name = str(recipe.data.validation)
    figures: dict[str, dict[str, float]] = {name: {"mAP": score}}
    validation = None
    try:
        lines = [line for line in read_run_log(run) if line.get("step") == step and "validation" in line]
    except DistapError:
        lines = []
    for line in lines:
        if _is(line["validation"].get("mAP"), score):
            figures = {name: _known(line["validation"])}
            figures |= {other: _known(of_set) for other, of_set in line.get("also", {}).items()}
    try:
        validation = read_evaluation(folder_of_step(run, step))
    except DistapError:
        return figures, None
    return figures, validation if _is(validation.figures.get("mAP"), score) else None


def _known(figures: dict[str, Any]) -> dict[str, float]:
    """Leave out figures that the log says are no number."""
    return {name: float(value) for name, value in figures.items() if isinstance(value, float | int)}


def _is(figure: Any, score: float) -> bool:
    """Tell whether a figure is the checkpoint's score, which ranks exchange in float64."""
    return isinstance(figure, float | int) and math.isclose(figure, score, rel_tol=0, abs_tol=1e-9)
