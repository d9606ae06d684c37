"""Write report.html and summary.json about one run or several runs."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from distap.data.images.decoding import MAX_PIXELS, EncodedImage
from distap.data.images.image_sets import open_images
from distap.data.images.whole_images import EncodedImages, Thumbnails
from distap.errors import DistapError
from distap.evaluation.saved import Evaluation, Retrieved
from distap.pages.charts import MOST_POINTS, Chart, Series, line_chart, percent
from distap.pages.contact_sheets import ContactSheets, Sheet
from distap.pages.page import THUMBNAIL, write_page
from distap.pages.runs import Run, differing_settings, read_run, run_names
from distap.retrieval.descriptor_files import reading
from distap.storage.atomic import write_whole
from distap.storage.locations import parse_source
from distap.storage.redact import without_secrets
from distap.storage.remotes import RemoteSettings
from distap.telemetry.runlog import version_with_commit

PAGE_FILE, SUMMARY_FILE = "report.html", "summary.json"
CHARTED = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")
CURVES = {
    "images_per_second": ("Images a second, all ranks", "images / s"),
    "learning_rate": ("Learning rate", "learning rate"),
    "gradient_norm": ("Norm of the gradient", "norm"),
    "spread": ("Spread of a batch's descriptors, 0 if all are alike", "squared distance"),
    "replay_drift": ("Replay drift, between an image's two descriptors", "distance"),
}


def report(
    folders: Sequence[Path],
    output: Path | None = None,
    reload: int | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Write a page about one run or several, and a summary as JSON; return the page's path and the summary.

    Args:
        output: folder to write to; by default the run's, or the one that holds all of the runs.
        reload: seconds after which a browser loads the page again.
    Raises:
        DistapError: a run's folder is not what a training writes.
    """
    with reading(folders[0], "distap train"):
        return _written(folders, output, reload)


def _written(folders: Sequence[Path], output: Path | None, reload: int | None) -> tuple[Path, dict[str, Any]]:
    several = len(folders) > 1
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DistapError("a run is named twice: there is nothing to compare")
    if several:
        runs = [read_run(folder, name=name) for folder, name in zip(folders, run_names(folders), strict=True)]
        evaluations = {run.name: run.after for run in runs if run.after}
        output = output or Path(os.path.commonpath([folder.resolve() for folder in folders]))
    else:
        runs = [read_run(folders[0])]
        evaluations = runs[0].evaluations()
        output = output or folders[0]
    read = {name: each.retrieved() for name, each in evaluations.items()}
    retrieved = {name: each for name, each in read.items() if each is not None}
    seconds = stage_seconds(runs)
    sheets, problem = contact_sheets(evaluations, retrieved, runs[-1].recipe)
    write_page(
        output / PAGE_FILE,
        "report.html",
        title=f"distap: {' and '.join(run.name for run in runs)}",
        made=time.time(),
        version=version_with_commit(),
        reload=reload,
        runs=runs,
        recipes={run.name: _recipe_text(run.recipe) for run in runs},
        problem=problem,
        settings=differing_settings(runs),
        evaluations=evaluations,
        training=training_charts(runs) if seconds else {},
        thinned=max(len(run.steps) for run in runs) if any(len(run.steps) > MOST_POINTS for run in runs) else 0,
        seconds=seconds,
        sheets=sheets,
    )
    summaries = {run.name: run.summary() for run in runs}
    summary: dict[str, Any] = {"runs": summaries} if several else summaries[runs[0].name]
    write_whole(output / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return output / PAGE_FILE, summary


def contact_sheets(
    evaluations: dict[str, Evaluation], retrieved: dict[str, Retrieved], recipe: dict[str, Any]
) -> tuple[list[Sheet], str]:
    """Return sheets of pictures of hits, and the reason if there are none."""
    try:
        if len(retrieved) < len(evaluations):
            return [], "neighbours are kept neither of galleries that are drawn nor of sets with a ground truth"
        if not evaluations:
            return [], ""
        return ContactSheets(retrieved, _thumbnails(list(evaluations.values()), recipe).jpeg).sheets(), ""
    except DistapError as error:
        return [], str(error)


def _recipe_text(recipe: dict[str, Any]) -> str:
    """Return the recipe as YAML without access to its data, since a report is shown to others."""
    data = {**recipe["data"], "remote": {**recipe["data"].get("remote", {}), "options": {}}}
    return without_secrets(yaml.safe_dump({**recipe, "data": data}, sort_keys=False, allow_unicode=True))


def _thumbnails(evaluations: Sequence[Evaluation], recipe: dict[str, Any]) -> Thumbnails:
    evaluation, data = evaluations[0], recipe["data"]
    if len({each.fingerprint for each in evaluations}) > 1:
        raise DistapError("the runs were evaluated on different data")
    kept = data.get("validation_index") if evaluation.data == data.get("validation") else None
    sources = [parse_source(evaluation.data, kept and Path(kept))]
    if evaluation.gallery is not None:
        sources.append(parse_source(evaluation.gallery))
    remote = RemoteSettings(**data.get("remote", {}))
    sets = [open_images(source, data.get("max_pixels", MAX_PIXELS), remote) for source in sources]
    if "+".join(images.fingerprint for images in sets) != evaluation.fingerprint:
        named = " or ".join(map(str, sources))
        raise DistapError(f"{named}: the data set has changed since it was evaluated in {evaluation.folder}")
    count = sum(len(images.keys) for images in sets)
    return Thumbnails(_Joined([images.reader for images in sets], len(sets[0].keys)), np.arange(count), THUMBNAIL)


class _Joined(NamedTuple):
    """Read images of a data set, followed by those of its separate gallery."""

    readers: Sequence[EncodedImages]
    own: int  # images of the first reader

    def encoded(self, sample: int) -> EncodedImage:
        is_own = sample < self.own
        return self.readers[0 if is_own else 1].encoded(sample if is_own else sample - self.own)


def training_charts(runs: Sequence[Run]) -> dict[str, Chart | None]:
    """Return curves over the training steps by title, with a line for each run."""

    def over_steps(name: str) -> list[Series]:
        return [Series(run.name, [(entry["step"], entry.get(name)) for entry in run.steps]) for run in runs]

    batches = over_steps("batch_mAP")
    validations = [
        Series(run.name, [(entry["step"], entry["validation"]["mAP"]) for entry in run.validations], marked=True)
        for run in runs
    ]
    precision = {"mAP of the batches (1 - loss)": batches, "mAP of the validation set": validations}
    charts = {title: line_chart(series, "mAP", percent) for title, series in precision.items()}
    return {
        "Loss of the global batch": line_chart(over_steps("loss"), "loss"),
        **{title: chart for title, chart in charts.items() if chart},  # not every loss is one of AP
        **{title: line_chart(over_steps(name), label, from_zero=True) for name, (title, label) in CURVES.items()},
    }


def stage_seconds(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each stage on rank 0 for each run; omit stages that no run has."""
    means = {
        run.name: {name: sum(e["seconds"].get(name, 0.0) for e in run.steps) / len(run.steps) for name in CHARTED}
        for run in runs
        if run.steps
    }
    used = [stage for stage in CHARTED if any(of_run[stage] for of_run in means.values())]
    return {name: {stage: of_run[stage] for stage in used} for name, of_run in means.items()}
