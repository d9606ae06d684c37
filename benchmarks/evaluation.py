"""Time and memory of evaluation, beside pytorch-metric-learning's AccuracyCalculator on the same descriptors.

What is compared takes turns in one run, so that a noisy machine is noisy for all of it. Descriptors are noisy images
of random classes, as many of a class as Stanford Online Products has, so that no figure is 0 or 1.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.peak import peak_bytes
from distap.data.shards.parallel import Track, untracked
from distap.errors import DistapError
from distap.retrieval.ground_truth_metrics import GradedQuery, evaluate_graded
from distap.retrieval.metrics import evaluate_labelled_set
from distap.retrieval.nearest import bounded_threads
from distap.telemetry.terminal import text_table

LEAST_OF_A_CLASS, MOST_OF_A_CLASS = 2, 9  # 5.5 on average; Stanford Online Products has 5.3
NOISE = 0.7  # of an image's own direction against its class's
CPU = torch.device("cpu")
LABELLED_IMAGES = 5000  # of the gallery that are easy, hard or junk to any query, as in Revisited Oxford
QUERIES, EASY, HARD, JUNK = 70, 40, 60, 40
ROWS_WRITTEN = 8192  # at once
LIBRARY = "pytorch-metric-learning"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        images, dimensions: N and C of the labelled set.
        rounds: times that each is done; the median counts.
        threads: of torch and Faiss.
    """

    images: int
    dimensions: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Figures:
    """What was measured of one way to evaluate a labelled set."""

    name: str
    seconds: float  # median
    peak_bytes: float  # beside the descriptors
    figures: dict[str, float]


@dataclass(frozen=True)
class GalleryFigures:
    """What was measured of queries of three protocols against a gallery in a file."""

    gallery: int
    dimensions: int
    queries: int
    seconds: float
    peak_bytes: float  # above what the process took before, with the pages of the file that are in memory
    process_peak_bytes: float  # of the whole process since its start
    figures: dict[str, float]


def measure(setting: Setting, track: Track = untracked) -> list[Figures]:
    """Evaluate one labelled set in every way, in turns."""
    descriptors, labels = labelled_set(setting.images, setting.dimensions)
    torch.set_num_threads(setting.threads)
    bounded_threads()
    candidates = _candidates(descriptors, labels)
    figures: dict[str, dict[str, float]] = {}
    peaks: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def run(name: str) -> None:
        started = time.perf_counter()
        figures[name] = candidates[name]()
        seconds[name].append(time.perf_counter() - started)

    turns = [name for _ in range(setting.rounds) for name in candidates]
    for name in track(turns, "evaluations", len(turns)):
        if name in peaks:
            run(name)
        else:
            peaks[name] = peak_bytes(partial(run, name), CPU)
    return [Figures(name, statistics.median(seconds[name]), peaks[name], figures[name]) for name in candidates]


def _candidates(descriptors: Tensor, labels: Tensor) -> dict[str, Callable[[], dict[str, float]]]:
    def full() -> dict[str, float]:
        return evaluate_labelled_set(descriptors, labels, 0).summary()

    candidates: dict[str, Callable[[], dict[str, float]]] = {"distap": full}
    try:
        from pytorch_metric_learning.utils.accuracy_calculator import (  # type: ignore[import-untyped]
            AccuracyCalculator,
        )
    except ImportError:
        return candidates

    def library() -> dict[str, float]:
        shared = {"R@1": "precision_at_1", "mAP@R": "mean_average_precision_at_r"}
        # It looks for as many neighbours as the greatest class needs; by default it would sort all.
        calculator = AccuracyCalculator(include=tuple(shared.values()), device=CPU, k="max_bin_count")
        found = calculator.get_accuracy(descriptors, labels)
        return {name: float(found[theirs]) for name, theirs in shared.items()}

    return {**candidates, LIBRARY: library}


def labelled_set(images: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Noisy images of random classes in any order, (N, C) and (N,)."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(LEAST_OF_A_CLASS, MOST_OF_A_CLASS + 1, (images,), generator=generator)
    labels = torch.arange(images).repeat_interleave(sizes)[:images]
    labels = labels[torch.randperm(images, generator=generator)]
    centres = normalize(torch.randn(int(labels.max()) + 1, dimensions, generator=generator))
    own = normalize(torch.randn(images, dimensions, generator=generator))
    return normalize((1 - NOISE) * centres[labels] + NOISE * own), labels


def measure_gallery(gallery: int, dimensions: int, threads: int) -> GalleryFigures:
    """Evaluate 70 queries in three protocols against a gallery of float16, in a file of a temporary folder."""
    if gallery < LABELLED_IMAGES:
        raise DistapError(f"a gallery of {gallery} images; expected at least {LABELLED_IMAGES}")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gallery.npy"
        queries, truth = write_gallery(path, gallery, dimensions)
        described = np.load(path, mmap_mode="r")
        figures: dict[str, float] = {}
        seconds = 0.0

        def run() -> None:
            nonlocal seconds
            started = time.perf_counter()
            figures.update(evaluate_graded(queries, described, truth).summary)
            seconds = time.perf_counter() - started

        peak = peak_bytes(run, CPU)
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    return GalleryFigures(gallery, dimensions, QUERIES, seconds, peak, process, figures)


def write_gallery(path: Path, gallery: int, dimensions: int) -> tuple[Tensor, list[GradedQuery]]:
    """Write descriptors of which the first are something to a query, and the others distractors.

    Returns:
        The queries' descriptors, and what is easy, hard and junk to each.
    """
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(QUERIES, dimensions, generator=generator))
    truth, near = [], torch.zeros(LABELLED_IMAGES, dimensions)
    for query in queries:
        rows = torch.randperm(LABELLED_IMAGES, generator=generator)[: EASY + HARD + JUNK]
        easy, hard, junk = rows.split((EASY, HARD, JUNK))
        near[easy] += 0.2 * query
        near[hard] += 0.12 * query
        near[junk] += 0.2 * query
        truth.append(GradedQuery(tuple(easy.tolist()), tuple(hard.tolist()), tuple(junk.tolist())))
    with path.open("wb") as file:
        # The array's head, then its rows: a map that is written to would count as memory of this process.
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f2", "fortran_order": False, "shape": (gallery, dimensions)}
        )
        for start in range(0, gallery, ROWS_WRITTEN):
            own = normalize(torch.randn(min(ROWS_WRITTEN, gallery - start), dimensions, generator=generator))
            labelled = near[start : start + len(own)]
            own[: len(labelled)] += labelled
            file.write(normalize(own).half().numpy().tobytes())
    return queries, truth


def table(figures: Sequence[Figures], setting: Setting) -> Table:
    """The figures of a labelled set for the terminal."""
    names = list(dict.fromkeys(name for row in figures for name in row.figures if not name.startswith("mP")))
    rows = [
        [
            row.name,
            f"{row.seconds:,.1f}",
            f"{row.peak_bytes / 1e6:,.0f}",
            *(f"{100 * row.figures[name]:.3f}" if name in row.figures else "-" for name in names),
        ]
        for row in figures
    ]
    title = f"a labelled set of {setting.images:,} descriptors of {setting.dimensions} dimensions"
    caption = (
        f"s: median of {setting.rounds} turns on {setting.threads} threads. MB: peak beside the descriptors. Figures "
        "in %."
    )
    return text_table(title, caption, ("", "s", "MB", *names), rows)


def agreement(figures: Sequence[Figures]) -> str:
    """How far the figures that several computed are apart, and how many times as long the library took.

    They are apart where similarities differ by less than float32 tells: the library ranks by distances.
    """
    apart = [
        max(values) - min(values)
        for name in {name for row in figures for name in row.figures}
        if len(values := [row.figures[name] for row in figures if name in row.figures]) > 1
    ]
    text = f"Shared figures are at most {max(apart, default=0):.0e} apart."
    times = {row.name: row.seconds for row in figures}
    if LIBRARY not in times:
        return f"{text} {LIBRARY} is not installed: pip install 'distap[metric-learning]'."
    ratios = [f"{times[LIBRARY] / spent:.2f} ({name})" for name, spent in times.items() if name != LIBRARY]
    return f"{text} Times as fast as {LIBRARY}: {', '.join(ratios)}."


def gallery_table(row: GalleryFigures) -> Table:
    """The figures of a great gallery for the terminal."""
    cells = [
        [protocol, *(f"{100 * row.figures[f'{protocol} {name}']:.2f}" for name in ("mAP", "mP@1", "mP@5", "mP@10"))]
        for protocol in ("Easy", "Medium", "Hard")
    ]
    title = f"{row.queries} queries against {row.gallery:,} descriptors of {row.dimensions} dimensions"
    caption = (
        f"All three protocols in {row.seconds:,.1f} s, {row.peak_bytes / 1e6:,.0f} MB above what the process took "
        f"before, {row.process_peak_bytes / 1e6:,.0f} MB in all, pages of the file included."
    )
    return text_table(title, caption, ("", "mAP", "mP@1", "mP@5", "mP@10"), cells)


def as_json(figures: Sequence[Figures] | GalleryFigures) -> str:
    """All figures."""
    if isinstance(figures, GalleryFigures):
        return json.dumps(asdict(figures), indent=1)
    return json.dumps([asdict(row) for row in figures], indent=1)
