"""Time and memory of evaluation, beside pytorch-metric-learning's AccuracyCalculator on the same
descriptors.

Descriptors are noisy images of random classes, with as many of a class as Stanford Online Products
has, so that no figure is 0 or 1.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from typer import Option

from benchmarks import harness
from benchmarks.measuring import peak_bytes
from distap.data.converters.revisited import DIFFICULTIES, OF_REVISITED
from distap.errors import DistapError
from distap.evaluation.given_descriptors import evaluate
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.row_blocks import installed_faiss, nearest, open_parts
from distap.retrieval.truth import Truth
from distap.world import World

# 5.5 on average; Stanford Online Products has 5.3
LEAST_OF_A_CLASS = 2
MOST_OF_A_CLASS = 9
NOISE = 0.7  # of an image's own direction against its class's
CPU = torch.device("cpu")
# of the gallery, which are easy, hard or junk to any query, as in Revisited Oxford
LABELLED_IMAGES = 5000
EASY = 40
HARD = 60
JUNK = 40
ROWS_OF_A_PART = 65_536
ROWS_MULTIPLIED = 1024
FOUND = 100  # neighbours that Faiss looks for
LIBRARY = "pytorch-metric-learning"
PRODUCT = "one dense product"
GALLERY_HEADINGS = ("", *OF_REVISITED)


class EvaluationBenchmark(harness.Benchmark):
    """Print time and memory of evaluating a labelled set, beside pytorch-metric-learning's
    AccuracyCalculator.

    distap evaluates by the full ranking. One dense product of all descriptors with all, without
    keeping it, is the measure of both. With --described: descriptors that `distap extract` wrote.
    With --gallery: Easy, Medium and Hard against distractors in files of the temporary folder, of 2
    bytes a number, next to the search of Faiss.
    """

    name: ClassVar[str] = "eval"
    images: Annotated[int, Option(help="Images of the labelled set.", min=20)] = 60_000
    dimensions: Annotated[int, Option(help="Dimensions of the descriptors.", min=2)] = 512
    described: Annotated[
        Path | None, Option(help="Folder of descriptors instead of made ones.")
    ] = None
    gallery: Annotated[
        int | None, Option(help="Rank this many descriptors for --queries instead.")
    ] = None
    queries: Annotated[int, Option(help="Queries against --gallery; ILIAS has 1,232.", min=1)] = 70
    rounds: harness.Rounds = 3
    threads: harness.Threads = os.cpu_count() or 1

    def report(self) -> harness.Report:
        torch.set_num_threads(self.threads)
        installed_faiss()
        return self._labelled_set() if self.gallery is None else self._gallery(self.gallery)

    def _labelled_set(self) -> harness.Report:
        if self.described is None:
            descriptors, labels = labelled_set(self.images, self.dimensions)
        else:
            stored = read_descriptors(self.described)
            descriptors = torch.from_numpy(np.array(stored.descriptors, dtype=np.float32))
            labels = torch.from_numpy(np.unique(stored.classes, return_inverse=True)[1])
        images, dimensions = descriptors.shape
        found: dict[str, dict[str, float]] = {}
        candidates: dict[str, Callable[[], None]] = {}
        for name, way in _evaluations(descriptors, labels).items():
            candidates[name] = lambda name=name, way=way: found.update({name: way()})  # type: ignore[misc]
        peaks = {name: peak_bytes(candidate, CPU) for name, candidate in candidates.items()}
        turns = harness.take_turns(candidates, self.rounds, World(), "evaluations")
        names = list(
            dict.fromkeys(
                name for values in found.values() for name in values if not name.startswith("mP")
            )
        )
        rows = []
        for name, values in found.items():
            cells = [f"{100 * values[figure]:.3f}" if figure in values else "-" for figure in names]
            rows.append([name, f"{turns[name].median:,.1f}", f"{peaks[name] / 1e6:,.0f}", *cells])
        title = f"a labelled set of {images:,} descriptors of {dimensions} dimensions"
        caption = (
            f"s: median of {self.rounds} turns on {self.threads} threads. MB: peak beside the"
            " descriptors."
        )
        figures = [
            {
                "name": name,
                "seconds": turns[name].median,
                "peak_bytes": peaks[name],
                "figures": found[name],
            }
            for name in found
        ]
        table = harness.FiguresTable(
            title, f"{caption} Figures in %.", ("", "s", "MB", *names), rows
        )
        times = {name: values.median for name, values in turns.items()}
        return harness.Report(figures, [table], [agreement(found), _speed(times)])

    def _gallery(self, gallery: int) -> harness.Report:
        """Evaluate queries in three protocols against a gallery of float16 in files."""
        if gallery < LABELLED_IMAGES:
            raise DistapError(
                "command.wrong_option",
                f"a gallery of {gallery} images; expected at least {LABELLED_IMAGES}",
            )
        with tempfile.TemporaryDirectory() as folder:
            queries, truth = write_gallery(Path(folder), gallery, self.dimensions, self.queries)
            parts = open_parts([folder], self.dimensions)
            assert parts is not None
            # Only the images that some query names are the gallery: the others are right and junk
            # for none.
            named = parts[:LABELLED_IMAGES]
            distractors = None
            if gallery > LABELLED_IMAGES:
                distractors = open_parts(sorted(Path(folder).iterdir())[1:], self.dimensions)
            figures: dict[str, Any] = {}

            def evaluated() -> None:
                found = evaluate_descriptors(
                    queries, named, truth, OF_REVISITED, distractors=distractors
                )
                figures.update(found.summary())

            started = time.perf_counter()
            peak = peak_bytes(evaluated, CPU)
            seconds = time.perf_counter() - started
            started = time.perf_counter()
            faiss_peak = peak_bytes(lambda: nearest(queries.numpy(), parts, FOUND), CPU)
            faiss_seconds = time.perf_counter() - started
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1024 if sys.platform == "linux" else 1
        )
        rows = [
            [
                protocol,
                *(f"{100 * figures[f'{protocol} {name}']:.2f}" for name in GALLERY_HEADINGS[1:]),
            ]
            for protocol in ("Easy", "Medium", "Hard")
        ]
        title = (
            f"{self.queries:,} queries against {gallery:,} descriptors of {self.dimensions}"
            " dimensions"
        )
        caption = (
            f"All three protocols in {seconds:,.1f} s, {peak / 1e6:,.0f} MB above the process's"
            f" memory before, {process / 1e6:,.0f} MB in all, pages of the file included. Faiss"
            f" finds the {FOUND} nearest in {faiss_seconds:,.1f} s, {faiss_peak / 1e6:,.0f} MB."
        )
        facts = {
            "seconds": seconds,
            "peak_bytes": peak,
            "process_peak_bytes": process,
            "figures": figures,
        }
        facts |= {"faiss_seconds": faiss_seconds, "faiss_peak_bytes": faiss_peak}
        return harness.Report(facts, [harness.FiguresTable(title, caption, GALLERY_HEADINGS, rows)])


def _evaluations(descriptors: Tensor, labels: Tensor) -> dict[str, Callable[[], dict[str, float]]]:
    def product() -> dict[str, float]:
        held = torch.empty(ROWS_MULTIPLIED, len(descriptors))
        for rows in descriptors.split(ROWS_MULTIPLIED):
            torch.mm(rows, descriptors.t(), out=held[: len(rows)])
        return {}

    def distap() -> dict[str, float]:
        figures = evaluate(descriptors, labels)
        return {name: figures[name] for name in figures if name not in ("queries", "left_out")}

    evaluations: dict[str, Callable[[], dict[str, float]]] = {PRODUCT: product, "distap": distap}
    try:
        from pytorch_metric_learning.utils.accuracy_calculator import (  # type: ignore[import-untyped]
            AccuracyCalculator,
        )
    except ImportError:
        return evaluations

    def library() -> dict[str, float]:
        shared = {"R@1": "precision_at_1", "mAP@R": "mean_average_precision_at_r"}
        # It looks for as many neighbours as the greatest class needs; by default it would sort all.
        calculator = AccuracyCalculator(
            include=tuple(shared.values()), device=CPU, k="max_bin_count"
        )
        figures = calculator.get_accuracy(descriptors, labels)
        return {name: float(figures[theirs]) for name, theirs in shared.items()}

    return {**evaluations, LIBRARY: library}


def labelled_set(images: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of random classes in any order, (N, C) and (N,)."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(LEAST_OF_A_CLASS, MOST_OF_A_CLASS + 1, (images,), generator=generator)
    labels = torch.arange(images).repeat_interleave(sizes)[:images]
    labels = labels[torch.randperm(images, generator=generator)]
    centres = normalize(torch.randn(int(labels.max()) + 1, dimensions, generator=generator))
    of_class = normalize(torch.randn(images, dimensions, generator=generator))
    return normalize((1 - NOISE) * centres[labels] + NOISE * of_class), labels


def write_gallery(folder: Path, gallery: int, dimensions: int, count: int) -> tuple[Tensor, Truth]:
    """Write a gallery in parts: in the first are descriptors relevant to some query, in the others
    distractors.

    Returns:
        The queries' descriptors, and what they are to retrieve.
    """
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(count, dimensions, generator=generator))
    positives = []
    of_junk = []
    near = torch.zeros(LABELLED_IMAGES, dimensions)
    for query in queries:
        rows = torch.randperm(LABELLED_IMAGES, generator=generator)[: EASY + HARD + JUNK]
        easy, hard, junk = rows.split((EASY, HARD, JUNK))
        near[easy] += 0.2 * query
        near[hard] += 0.12 * query
        near[junk] += 0.2 * query
        positives.append([*easy.tolist(), *hard.tolist()])
        of_junk.append(junk.tolist())
    for number, start in enumerate([0, *range(LABELLED_IMAGES, gallery, ROWS_OF_A_PART)]):
        size = LABELLED_IMAGES if start == 0 else min(ROWS_OF_A_PART, gallery - start)
        rows_of_part = normalize(torch.randn(size, dimensions, generator=generator))
        if start == 0:
            rows_of_part = normalize(rows_of_part + near)
        np.save(folder / f"{number:04d}.npy", rows_of_part.half().numpy())
    return queries, Truth(
        LABELLED_IMAGES, positives, of_junk, [[1] * EASY + [2] * HARD] * count, DIFFICULTIES
    )


def agreement(figures_of_contenders: dict[str, dict[str, float]]) -> str:
    """Say how far the figures that several ways computed are apart.

    They differ if similarities differ by less than float32 can tell, since the library ranks by
    distances.
    """
    names = {name for figures in figures_of_contenders.values() for name in figures}
    values = [
        [figures[name] for figures in figures_of_contenders.values() if name in figures]
        for name in names
    ]
    apart = max(max(of_contenders) - min(of_contenders) for of_contenders in values)
    return f"Shared figures are at most {apart:.0e} apart."


def _speed(seconds: dict[str, float]) -> str:
    sentence = (
        f"distap takes {seconds['distap'] / seconds[PRODUCT]:.2f} of the time of one dense product."
    )
    if LIBRARY not in seconds:
        return f"{sentence} {LIBRARY} is not installed: pip install 'distap[metric-learning]'."
    return (
        f"{sentence} It is {seconds[LIBRARY] / seconds['distap']:.2f} times as fast as {LIBRARY}."
    )
