"""From run folders to report.html and summary.json."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.errors import DistapError
from distap.evaluation.saved import Retrieved, SavedEvaluation
from distap.pages.contact_sheets import Confusion, Sheet
from distap.pages.report import Report, write_report
from distap.pages.run_report.pictures import THUMBNAIL, thumbnails_of
from distap.pages.run_report.retrieval import Gallery
from distap.pages.run_report.runs import Run, differing_settings, names_of, read_run
from distap.pages.scores import Scores
from distap.storage.atomic import write_whole

PAGE_FILE, SUMMARY_FILE = "report.html", "summary.json"


@dataclass(frozen=True)
class _Shown:
    """What a page shows of what networks retrieved."""

    sheets: Sequence[Sheet] = ()
    confused: Sequence[Confusion] = ()
    notes: Sequence[str] = ()


def report(
    folders: Sequence[Path], output: Path | None = None, before: Path | None = None, after: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write the report page of a run, or of several side by side, and a summary as JSON.

    Args:
        folders: of the trainings.
        output: folder to write to; by default the run's, or the one that holds all of the runs.
        before, after: with one run: what `distap eval --output` wrote for the network before and after it, in the
            place of the run's own first and newest evaluation.
    Returns:
        The page's path, and the summary: of the one run, or of each by its name.
    Raises:
        DistapError: a folder lacks its files, or the two evaluations of a run are of different data.
    """
    several = len(folders) > 1
    if several and (before or after):
        raise DistapError("--before and --after are of one run: give one RUN, or leave them out")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DistapError("a run is named twice: there is nothing to compare")
    runs = [read_run(folder, before, after) for folder in folders]
    output = output or (Path(os.path.commonpath([run.resolve() for run in folders])) if several else folders[0])
    names = names_of(runs) if several else [str(folders[0])]
    kept = {n: run.after for n, run in zip(names, runs, strict=True) if run.after} if several else _of_one(runs[0])
    retrieved = {name: each.retrieved() for name, each in kept.items()}
    shown = _shown(kept, retrieved, runs[-1])
    facts = [run.facts() for run in runs]
    page = Report(
        title=f"distap: {' and '.join(names)}" if several else f"distap: {runs[0].folder}",
        runs=[run.lines(name) for run, name in zip(runs, names, strict=True)],
        facts={name: [of_run[name] for of_run in facts] for name in facts[0]},
        settings=differing_settings(runs) if several else {},
        scores=[_scores(name, each, retrieved[name]) for name, each in kept.items()],
        sheets=shown.sheets,
        confused=shown.confused,
        notes=[*_missing(runs, names), *shown.notes],
    )
    write_report(output / PAGE_FILE, page)
    summaries = {name: run.summary() for name, run in zip(names, runs, strict=True)}
    summary: dict[str, Any] = {"runs": summaries} if several else summaries[names[0]]
    write_whole(output / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return output / PAGE_FILE, summary


def _of_one(run: Run) -> dict[str, SavedEvaluation]:
    if run.before and run.after and run.before.fingerprint != run.after.fingerprint:
        raise DistapError(
            f"{run.before.folder} and {run.after.folder} are evaluations of different data: they cannot be compared"
        )
    return run.evaluations()


def _scores(name: str, evaluation: SavedEvaluation, retrieved: Retrieved) -> Scores:
    precisions = retrieved.average_precision[retrieved.first_positive > 0].tolist()
    return Scores(name, evaluation.figures, evaluation.precision_at_recall, precisions, evaluation.classes)


def _shown(evaluations: dict[str, SavedEvaluation], retrieved: dict[str, Retrieved], run: Run) -> _Shown:
    """Pictures of what the networks retrieved; where the data set is not there, a note that says so."""
    if not evaluations:
        return _Shown()
    if len({each.fingerprint for each in evaluations.values()}) > 1:
        return _Shown(notes=["The runs were evaluated on different data: their queries are not shown side by side."])
    try:
        thumbnails = thumbnails_of(next(iter(evaluations.values())), run.recipe)
    except DistapError as error:
        return _Shown(notes=[f"No pictures, since their data set cannot be read: {error}"])
    gallery = Gallery(retrieved, thumbnails)
    sheets, confused = gallery.sheets(), gallery.confusions()
    count = 2 * len(confused) + sum(
        1 + sum(len(answer.hits) for answer in example.answers) for each in sheets for example in each.examples
    )
    size = f"{count} thumbnails of at most {THUMBNAIL} x {THUMBNAIL} pixels are part of this page."
    return _Shown(sheets, confused, [size])


def _missing(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """What a reader may look for in vain, and how to get it."""
    missing = [
        f"{name}: no evaluation is kept in the run, so that there is nothing to say of what it retrieves; set "
        "evaluation.every in the recipe, or give what `distap eval --output` wrote as --after."
        for run, name in zip(runs, names, strict=True)
        if run.after is None
    ]
    if len({json.dumps(run.recipe["loss"], sort_keys=True) for run in runs}) > 1:
        missing.append("The runs have different losses, whose values cannot be compared; mAP can.")
    return missing
