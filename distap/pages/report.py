"""Write report.html and summary.json of a run, or of several side by side."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distap.data.images.decoding import MAX_PIXELS
from distap.data.images.thumbnails import Thumbnails
from distap.data.loading.reading import Reader
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.saved import SavedEvaluation
from distap.pages.charts import MOST_POINTS
from distap.pages.contact_sheets import ContactSheets
from distap.pages.page import write_page
from distap.pages.run_charts import precision_charts, seconds_chart, stage_seconds, training_charts
from distap.pages.runs import Run, differing_settings, read_run, run_names
from distap.storage.atomic import write_whole
from distap.storage.locations import parse_source
from distap.storage.remotes import RemoteSettings

PAGE_FILE, SUMMARY_FILE = "report.html", "summary.json"
THUMBNAIL = 112  # pixels
LOWEST = 12  # classes


def report(
    folders: Sequence[Path], output: Path | None = None, before: Path | None = None, after: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write the report page of a run, or of several side by side, and a summary as JSON.

    Args:
        folders: of the trainings.
        output: folder to write to; by default the run's, or the one that holds all of the runs.
        before, after: with one run: folders that `distap eval --output` wrote for the network before and after the
            training, to use instead of the run's own first and newest evaluation.
    Returns:
        The page's path, and the summary: of the one run, or of each by its name.
    """
    several = len(folders) > 1
    if several and (before or after):
        raise DistapError("--before and --after are for one run: name one RUN, or leave them out")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DistapError("a run is named twice: there is nothing to compare")
    if several:
        runs = [read_run(folder, name=name) for folder, name in zip(folders, run_names(folders), strict=True)]
        evaluations = {run.name: run.after for run in runs if run.after}
        output = output or Path(os.path.commonpath([folder.resolve() for folder in folders]))
    else:
        runs = [read_run(folders[0], before, after)]
        evaluations = runs[0].evaluations()
        output = output or folders[0]
    retrieved = {name: each.retrieved() for name, each in evaluations.items()}
    seconds = stage_seconds(runs)
    notes = _missing(runs)
    sheets, confusions = [], []
    try:
        if evaluations:
            thumbnails = _thumbnails(list(evaluations.values()), runs[-1].recipe)
            chosen = ContactSheets(retrieved, thumbnails.jpeg)
            sheets, confusions = chosen.sheets(), chosen.confusions()
    except DistapError as error:
        notes.append(f"This page has no pictures: {error}")
    write_page(
        output / PAGE_FILE,
        "report.html",
        title=f"distap: {' and '.join(run.name for run in runs)}",
        runs=runs,
        notes=notes,
        settings=differing_settings(runs),
        evaluations=evaluations,
        training=training_charts(runs) if seconds else {},
        thinned=max(len(run.steps) for run in runs) if any(len(run.steps) > MOST_POINTS for run in runs) else 0,
        seconds=seconds,
        seconds_chart=None if several or not seconds else seconds_chart(runs[0], list(seconds[runs[0].name])),
        precision=precision_charts(evaluations, retrieved),
        sheets=sheets,
        confusions=confusions,
        lowest=_lowest_classes(list(evaluations.values())),
    )
    summaries = {run.name: run.summary() for run in runs}
    summary: dict[str, Any] = {"runs": summaries} if several else summaries[runs[0].name]
    write_whole(output / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return output / PAGE_FILE, summary


def _thumbnails(evaluations: Sequence[SavedEvaluation], recipe: dict[str, Any]) -> Thumbnails:
    """Thumbnails of the images that were evaluated; the recipe says how a remote data set is reached."""
    evaluation, data = evaluations[0], recipe["data"]
    if len({each.fingerprint for each in evaluations}) > 1:
        raise DistapError("the runs were evaluated on different data")
    kept = data.get("validation_index") if evaluation.data == data.get("validation") else None
    remote = RemoteSettings(**data.get("remote", {}))
    source = parse_source(evaluation.data, kept and Path(kept))
    index = load_index(source, remote)
    if index.fingerprint != evaluation.fingerprint:
        raise DistapError(f"{source}: the data set has changed since it was evaluated in {evaluation.folder}")
    reader = Reader(source, index, data.get("max_pixels", MAX_PIXELS), remote=remote)
    return Thumbnails(reader, np.arange(len(index)), THUMBNAIL)


def _lowest_classes(evaluations: Sequence[SavedEvaluation]) -> list[str]:
    """The classes with the lowest mAP by the last network."""
    classes = evaluations[-1].classes if evaluations else {}
    return sorted(classes, key=lambda name: (classes[name].get("mAP", 1.0), name))[:LOWEST]


def _missing(runs: Sequence[Run]) -> list[str]:
    """Notes on what the page cannot show, and how to get it."""
    notes = [
        f"{run.name}: the run kept no evaluation, so this page cannot show what it retrieves; set evaluation.every "
        "in the recipe, or give the folder that `distap eval --output` wrote as --after."
        for run in runs
        if run.after is None
    ]
    if len({json.dumps(run.recipe["loss"], sort_keys=True) for run in runs}) > 1:
        notes.append("The runs have different losses, whose values cannot be compared; mAP can.")
    return notes
