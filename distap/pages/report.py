"""Write report.html and summary.json about a run, once or while it trains."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

import distap
from distap.checkpoint.lease import FILE, RENEW_SECONDS, STALE_RENEWALS
from distap.data.images.whole_images import Thumbnails, thumbnails_of
from distap.data.joined import JoinedImages
from distap.data.loading.reader import open_images
from distap.errors import DistapError, without_secrets
from distap.evaluation.saved import (
    Evaluation,
    Retrieved,
)
from distap.pages.charts import MOST_POINTS, Chart
from distap.pages.page import THUMBNAIL, write_page
from distap.pages.run import Run, read_run
from distap.randomness import permutation
from distap.retrieval.descriptor_files import reading
from distap.storage.atomic import write_whole
from distap.storage.locations import sets_in_words
from distap.telemetry.terminal import print_warning

PAGE_FILE = "report.html"
SUMMARY_FILE = "summary.json"
CHARTED = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")
CURVES = {
    "images_per_second": ("Images a second, all ranks", "images / s"),
    "learning_rate": ("Learning rate", "learning rate"),
    "gradient_norm": ("Norm of the gradient", "norm"),
    "spread": ("Spread of a batch's descriptors, 0 if all are alike", "squared distance"),
    "replay_drift": ("Replay drift, between an image's two descriptors", "distance"),
}
RANDOM = 10
HARDEST = 8
HITS = 10
FRAMES = (
    "Best first: images of the query's class have a green frame (✓), others a dashed red one (✗)."
)


def report(
    folder: Path, output: Path | None = None, reload: int | None = None
) -> tuple[Path, dict[str, Any]]:
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
        by_set = run.evaluations()
        seconds = stage_seconds(run)
        sheets, problems = contact_sheets(by_set)
        write_page(
            output / PAGE_FILE,
            "report.html",
            title=f"distap: {folder}",
            made=time.time(),
            version=distap.__version__,
            reload=reload,
            run=run,
            trained_on=without_secrets(sets_in_words(run.recipe["data"]["train"])),
            # Without access to its data, since a report is shown to others.
            recipe_yaml=without_secrets(
                yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
            ),
            problems=problems,
            by_set=by_set,
            training=training_charts(run) if seconds else {},
            thinned=len(run.steps) if len(run.steps) > MOST_POINTS else 0,
            seconds=seconds,
            sheets=sheets,
        )
        summary = run.summary()
        write_whole(output / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return output / PAGE_FILE, summary


class Picture(NamedTuple):
    key: str
    label: str  # name of its class
    jpeg: bytes | None  # its thumbnail; None if it cannot be read
    right: bool = False  # of the query's class


class Answer(NamedTuple):
    name: str  # of a network, such as "before"
    average_precision: float
    first_positive: int  # rank, from 1, of the first hit of the query's class
    hits: list[Picture]  # best first


# By title: why the queries were chosen, and each query with its answers.
Examples = list[tuple[Picture, list[Answer]]]
Sheets = dict[str, tuple[str, Examples]]


def sheets_of(retrieved: dict[str, Retrieved], thumbnail: Callable[[int], bytes | None]) -> Sheets:
    """Choose queries that several networks answered on one data set: some at random, and those with
    the lowest AP.

    The last network decides what is hard.
    """
    name, last = list(retrieved.items())[-1]
    answered = (hits.sample[np.flatnonzero(hits.first_positive)] for hits in retrieved.values())
    queries = reduce(np.intersect1d, answered)  # common to all, by their numbers in the data set
    precision = last.average_precision[np.searchsorted(last.sample, queries)]

    drawn = permutation(len(precision), 0)[:RANDOM]
    hardest = np.argsort(precision, kind="stable")[:HARDEST]
    chosen = {
        "Neighbours of some queries": ("Drawn at random, not selected.", drawn),
        "Hardest queries": (f"The queries with the lowest AP ({name}).", hardest),
    }
    return {
        title: (f"{why} {FRAMES}", examples_of(retrieved, queries[rows].tolist(), thumbnail))
        for title, (why, rows) in chosen.items()
        if len(rows)
    }


def examples_of(
    retrieved: dict[str, Retrieved], samples: list[int], thumbnail: Callable[[int], bytes | None]
) -> Examples:
    """Return queries, by their numbers in the data set, with the answers of each network."""

    def picture(hits: Retrieved, row: int) -> Picture:
        jpeg = thumbnail(int(hits.sample[row]))
        return Picture(str(hits.key[row]), str(hits.class_name[row]), jpeg)

    def example(sample: int) -> tuple[Picture, list[Answer]]:
        answers = []
        for network, hits in retrieved.items():
            row = int(np.searchsorted(hits.sample, sample))
            query = picture(hits, row)
            pictures = [
                picture(hits, hit)._replace(
                    right=bool(hits.class_name[hit] == hits.class_name[row])
                )
                for hit in hits.neighbours[row, :HITS].tolist()
            ]
            average_precision = float(hits.average_precision[row])
            answers.append(
                Answer(network, average_precision, int(hits.first_positive[row]), pictures)
            )
        return query, answers

    return [example(sample) for sample in samples]


def contact_sheets(by_set: dict[str, dict[str, Evaluation]]) -> tuple[Sheets, list[str]]:
    """Return sheets of pictures of hits of each data set, and why some have none."""
    sheets: Sheets = {}
    problems = list[str]()
    for name, evaluations in by_set.items():
        of_set = f", {name}" if len(by_set) > 1 else ""
        try:
            for title, sheet in _sheets_of_set(evaluations).items():
                sheets[title + of_set] = sheet
        except DistapError as error:
            problems.append(f"{without_secrets(name)}: {error}" if of_set else str(error))
    return sheets, problems


def _sheets_of_set(evaluations: dict[str, Evaluation]) -> Sheets:
    retrieved = dict[str, Retrieved]()
    for name, evaluation in evaluations.items():
        hits = evaluation.retrieved()
        if hits is None:
            raise DistapError(
                "evaluation.no_neighbours",
                "neighbours are kept neither of galleries that are drawn or merged nor of sets with"
                " a ground truth",
            )
        retrieved[name] = hits
    return sheets_of(retrieved, thumbnails(next(iter(evaluations.values()))))


def thumbnails(evaluation: Evaluation) -> Thumbnails:
    sources = [source for source in (evaluation.data, evaluation.gallery) if source is not None]
    images = JoinedImages(map(open_images, sources))
    if images.fingerprint != evaluation.fingerprint:
        raise DistapError(
            "data.changed",
            f"{' or '.join(sources)}: the data set has changed since it was evaluated in"
            f" {evaluation.folder}",
        )
    return thumbnails_of(images.encoded, THUMBNAIL)


def training_charts(run: Run) -> dict[str, Chart]:
    """Return curves over the training steps by title."""

    def over_steps(name: str) -> list[tuple[float, float | None]]:
        return [(entry["step"], entry.get(name)) for entry in run.steps]

    validations = [(entry["step"], entry["validation"].get("mAP")) for entry in run.validations]
    is_mean = isinstance(run.recipe["data"].get("validation"), dict)
    validated = "the validation sets, mean" if is_mean else "the validation set"
    precision = {
        "mAP of the batches (1 - loss)": Chart(over_steps("batch_mAP"), "mAP", in_percent=True),
        f"mAP of {validated}": Chart(validations, "mAP", in_percent=True, marked=True),
    }
    of_sets = {
        f"Loss of {name}": Chart(
            [
                (entry["step"], entry["sets"][name]["loss"])
                for entry in run.steps
                if name in entry.get("sets", {})
            ],
            "loss",
        )
        for name in sorted({name for entry in run.steps for name in entry.get("sets", {})})
    }
    of_device = [
        (entry["step"], entry["device_memory"]["peak"] / 1e9)
        for entry in run.steps
        if "device_memory" in entry
    ]
    memory = {}
    if of_device:  # of a training on a GPU
        memory = {"Greatest GPU memory of rank 0": Chart(of_device, "GB", from_zero=True)}
    return {
        "Loss of the global batch": Chart(over_steps("loss"), "loss"),
        **of_sets,
        # not every loss is one of AP
        **{title: chart for title, chart in precision.items() if chart.points},
        **{
            title: Chart(over_steps(name), label, from_zero=True)
            for name, (title, label) in CURVES.items()
        },
        **memory,
    }


def stage_seconds(run: Run) -> dict[str, float]:
    """Return the mean seconds of each stage on rank 0, without stages that the run lacks."""
    count = max(len(run.steps), 1)
    means = {
        name: sum(entry["seconds"].get(name, 0.0) for entry in run.steps) / count
        for name in CHARTED
    }
    return {name: mean for name, mean in means.items() if mean}


def follow_run(folder: Path, seconds: float, write: Callable[[], Any]) -> None:
    """Call `write` at an interval while a training renews its lease of a run's folder, or until
    Ctrl-C.
    """
    with suppress(KeyboardInterrupt, FileNotFoundError):  # at its end a training removes the lease
        while time.time() - (folder / FILE).stat().st_mtime < STALE_RENEWALS * RENEW_SECONDS:
            try:
                write()
            except DistapError as error:
                # Its training may not have written its first line, or goes on just now.
                print_warning(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)
