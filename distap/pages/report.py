"""Write report.html and summary.json about a run, once or while it trains."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import distap
from distap.checkpoint.lease import FILE, RENEW_SECONDS, STALE_RENEWALS
from distap.data.images.decoding import EncodedImage
from distap.data.images.whole_images import Thumbnails
from distap.data.loading.reader import open_images
from distap.errors import DistapError
from distap.evaluation.saved import Evaluation
from distap.pages.charts import MOST_POINTS, Chart, line_chart
from distap.pages.contact_sheets import ContactSheets, Sheet
from distap.pages.page import THUMBNAIL, write_page
from distap.pages.runs import Run, read_run
from distap.retrieval.descriptor_files import reading
from distap.storage.atomic import write_whole
from distap.storage.locations import parse_source
from distap.storage.remotes import RemoteSettings
from distap.storage.texts import without_secrets
from distap.telemetry.terminal import print_warning

PAGE_FILE, SUMMARY_FILE = "report.html", "summary.json"
CHARTED = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")
CURVES = {
    "images_per_second": ("Images a second, all ranks", "images / s"),
    "learning_rate": ("Learning rate", "learning rate"),
    "gradient_norm": ("Norm of the gradient", "norm"),
    "spread": ("Spread of a batch's descriptors, 0 if all are alike", "squared distance"),
    "replay_drift": ("Replay drift, between an image's two descriptors", "distance"),
}


def report(folder: Path, output: Path | None = None, reload: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Write a page about a run, and a summary as JSON; return the page's path and the summary.

    Args:
        output: folder to write to; by default the run's.
        reload: seconds after which a browser loads the page again.
    Raises:
        DistapError: the run's folder is not what a training writes.
    """
    output = output or folder
    with reading(folder, "distap train"):
        run = read_run(folder)
        evaluations = run.evaluations()
        seconds = stage_seconds(run)
        sheets, problem = contact_sheets(evaluations, run.recipe)
        write_page(
            output / PAGE_FILE,
            "report.html",
            title=f"distap: {folder}",
            made=time.time(),
            version=distap.__version__,
            reload=reload,
            run=run,
            # Without access to its data, since a report is shown to others.
            recipe_yaml=without_secrets(yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)),
            problem=problem,
            evaluations=evaluations,
            training=training_charts(run) if seconds else {},
            thinned=len(run.steps) if len(run.steps) > MOST_POINTS else 0,
            seconds=seconds,
            sheets=sheets,
        )
        summary = run.summary()
        write_whole(output / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return output / PAGE_FILE, summary


def contact_sheets(evaluations: dict[str, Evaluation], recipe: dict[str, Any]) -> tuple[list[Sheet], str]:
    """Return sheets of pictures of hits, and the reason if there are none."""
    if not evaluations:
        return [], ""
    try:
        read = {name: each.retrieved() for name, each in evaluations.items()}
        retrieved = {name: each for name, each in read.items() if each is not None}
        if len(retrieved) < len(evaluations):
            return [], "neighbours are kept neither of galleries that are drawn nor of sets with a ground truth"
        return ContactSheets(retrieved, _thumbnails(next(iter(evaluations.values())), recipe).jpeg).sheets(), ""
    except DistapError as error:
        return [], str(error)


def _thumbnails(evaluation: Evaluation, recipe: dict[str, Any]) -> Thumbnails:
    data = recipe["data"]
    kept = data.get("validation_index") if evaluation.data == data.get("validation") else None
    sources = [parse_source(evaluation.data, kept and Path(kept))]
    if evaluation.gallery is not None:
        sources.append(parse_source(evaluation.gallery))
    remote = RemoteSettings(**data.get("remote", {}))
    sets = [open_images(source, remote) for source in sources]
    if "+".join(images.fingerprint for images in sets) != evaluation.fingerprint:
        named = " or ".join(map(str, sources))
        raise DistapError(f"{named}: the data set has changed since it was evaluated in {evaluation.folder}")

    def encoded(sample: int) -> EncodedImage:  # those of a separate gallery follow
        is_of_gallery = sample >= len(sets[0])
        return sets[is_of_gallery].reader.encoded(sample - is_of_gallery * len(sets[0]))

    return Thumbnails(encoded, np.arange(sum(map(len, sets))), THUMBNAIL)


def training_charts(run: Run) -> dict[str, Chart | None]:
    """Return curves over the training steps by title."""

    def over_steps(name: str) -> list[tuple[float, float | None]]:
        return [(entry["step"], entry.get(name)) for entry in run.steps]

    validations = [(entry["step"], entry["validation"]["mAP"]) for entry in run.validations]
    precision = {
        "mAP of the batches (1 - loss)": line_chart(over_steps("batch_mAP"), "mAP", in_percent=True),
        "mAP of the validation set": line_chart(validations, "mAP", in_percent=True, marked=True),
    }
    return {
        "Loss of the global batch": line_chart(over_steps("loss"), "loss"),
        **{title: chart for title, chart in precision.items() if chart},  # not every loss is one of AP
        **{title: line_chart(over_steps(name), label, from_zero=True) for name, (title, label) in CURVES.items()},
    }


def stage_seconds(run: Run) -> dict[str, float]:
    """Return the mean seconds of each stage on rank 0, without stages that the run lacks."""
    count = max(len(run.steps), 1)
    means = {name: sum(entry["seconds"].get(name, 0.0) for entry in run.steps) / count for name in CHARTED}
    return {name: mean for name, mean in means.items() if mean}


def follow_run(folder: Path, seconds: float, write: Callable[[], Any]) -> None:
    """Call `write` at an interval until the run in `folder` no longer trains, or until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while is_training(folder):
            try:
                write()
            except DistapError as error:  # its training may not have written its first line, or goes on just now
                print_warning(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)


def is_training(folder: Path) -> bool:
    """Tell whether a training holds the lease of a run folder: a training renews it, and removes it at its end."""
    try:
        age = time.time() - (folder / FILE).stat().st_mtime
    except FileNotFoundError:
        return False
    return age < STALE_RENEWALS * RENEW_SECONDS
