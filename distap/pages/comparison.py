"""Write the page of `distap compare`: figures with intervals, queries and classes that changed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import distap
from distap.errors import DistapError
from distap.evaluation.compared_queries import Compared, points
from distap.evaluation.comparing import Difference
from distap.evaluation.comparison_tables import headings, shown_rows
from distap.evaluation.saved import Evaluation
from distap.pages.charts import END, ticks
from distap.pages.page import write_page
from distap.pages.report import FRAMES, Examples, Sheets, examples_of, thumbnails
from distap.randomness import permutation

MOST_CHANGED = 6  # queries, and classes, on each side that are shown
MOST_DOTS = 3000  # of the scatter
NAMES_END = 170  # where the bars of intervals begin
ROW_HEIGHT = 30
MOST_MARKS = 6  # of the axis of intervals


@dataclass(frozen=True)
class Intervals:
    """Differences with a finite interval, one below the other, on an axis in points."""

    results: Sequence[Difference]

    @property
    def height(self) -> int:
        return ROW_HEIGHT * len(self.results) + 40

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the axis, which holds 0."""
        low = min(0.0, *(result.low for result in self.results))
        high = max(0.0, *(result.high for result in self.results))
        margin = 0.06 * (high - low) or 0.01
        return low - margin, high + margin

    def x(self, value: float) -> float:
        low, high = self.ends
        return NAMES_END + (value - low) / (high - low) * (END - NAMES_END)

    def marks(self) -> list[tuple[float, str]]:
        """Return place and text of each mark on the axis: as many as fit."""
        marks_of = (ticks(*self.ends, wanted) for wanted in (7, 6, 5, 4))
        values = next(values for values in marks_of if len(values) <= MOST_MARKS)
        return [(self.x(value), f"{100 * value:+.4g}" if value else "0") for value in values]


@dataclass(frozen=True)
class ComparedPage:
    """Gather what the page shows of one pair."""

    pair: Compared
    evaluations: Mapping[str, Sequence[Evaluation]]
    sheets: Sheets = field(default_factory=dict)
    problem: str = ""  # why there are no pictures

    @property
    def change(self) -> Any:
        return self.pair.after - self.pair.before

    @property
    def headings(self) -> list[str]:
        return headings(self.pair)

    @property
    def rows(self) -> list[list[str]]:
        return [*shown_rows(self.pair)]

    @property
    def intervals(self) -> Intervals:
        bounded = [result for result in self.pair.overall if np.isfinite(result.low)]
        return Intervals(bounded)

    @property
    def dots(self) -> list[tuple[float, float, bool]]:
        """Return before and after of queries, at most MOST_DOTS by chance, and whether it rose."""
        rows = permutation(len(self.pair.key), 0)[:MOST_DOTS]
        before = self.pair.before[rows].tolist()
        after = self.pair.after[rows].tolist()
        return [(old, new, new >= old) for old, new in zip(before, after, strict=True)]

    def changed_queries(self, sign: int) -> list[int]:
        """Return the rows of the queries that gained most, or lost most."""
        change = sign * self.change
        order = np.argsort(-change, kind="stable")[:MOST_CHANGED]
        rows: list[int] = order[change[order] > 0].tolist()
        return rows

    def names_of_changed(self, sign: int) -> list[list[str]]:
        pair = self.pair
        return [
            [
                str(pair.key[row]),
                str(pair.class_name[row]),
                points(pair.before[row]),
                points(pair.after[row]),
            ]
            for row in self.changed_queries(sign)
        ]

    def changed_classes(self) -> list[list[str]]:
        """Return the classes whose mean rose most, then those that fell most."""
        names, places = np.unique(self.pair.class_name, return_inverse=True)
        sizes = np.bincount(places)
        change = np.bincount(places, self.change) / sizes
        before = np.bincount(places, self.pair.before) / sizes
        order = np.argsort(-change, kind="stable")
        chosen = list(
            dict.fromkeys([*order[:MOST_CHANGED].tolist(), *order[-MOST_CHANGED:].tolist()])
        )
        return [
            [
                str(names[row]),
                f"{sizes[row]:,}",
                points(before[row]),
                points(before[row] + change[row]),
                points(change[row], signed=True),
            ]
            for row in chosen
            if change[row]
        ]


def write_comparison(
    path: Path, pairs: Sequence[Compared], evaluations: Mapping[str, Sequence[Evaluation]]
) -> None:
    """Write a page about each side next to its baseline.

    Args:
        evaluations: of each side's runs, by its name. Neighbours are those of the first run.
    """
    baseline = pairs[0].baseline.name
    write_page(
        path,
        "comparison.html",
        title=f"distap: {', '.join(pair.other.name for pair in pairs)} next to {baseline}",
        made=time.time(),
        version=distap.__version__,
        pages=[_with_sheets(ComparedPage(pair, evaluations)) for pair in pairs],
    )


def _with_sheets(page: ComparedPage) -> ComparedPage:
    """Add pictures of the queries that changed most, with their neighbours in both networks."""
    pair = page.pair
    both = [page.evaluations[side.name][0] for side in (pair.baseline, pair.other)]
    if not both[0].fingerprint or both[0].fingerprint != both[1].fingerprint:
        return replace(page, problem="the sides are not networks on the same images")
    try:
        hits = [evaluation.retrieved() for evaluation in both]
        if hits[0] is None or hits[1] is None:
            return replace(page, problem="neighbours are not kept by this protocol")
        retrieved = {pair.baseline.name: hits[0], pair.other.name: hits[1]}
        # The queries alone: images of a gallery that follow them may have the same names.
        queries = len(hits[0].average_precision)
        sample_of = dict(
            zip(hits[0].key[:queries].tolist(), hits[0].sample[:queries].tolist(), strict=True)
        )
        thumbnail = thumbnails(both[0])
        sheets = Sheets()
        for title, sign in (("gained", 1), ("lost", -1)):
            samples = [sample_of[pair.key[row]] for row in page.changed_queries(sign)]
            why = f"The queries whose {pair.overall[0].figure} {title} most. {FRAMES}"
            examples = examples_of(retrieved, samples, thumbnail)
            if any(len(side.runs) > 1 for side in (pair.baseline, pair.other)):
                why += " Neighbours are those of the first run of each side."
                examples = _with_means(page, sign, examples)
            sheets[title] = (why, examples)
    except DistapError as error:
        return replace(page, problem=str(error))
    return replace(page, sheets=sheets)


def _with_means(page: ComparedPage, sign: int, examples: Examples) -> Examples:
    """Name the mean over runs, by which the queries are chosen, in front of each first run."""
    pair = page.pair
    figure = pair.overall[0].figure
    named: Examples = []
    for row, (query, answers) in zip(page.changed_queries(sign), examples, strict=True):
        means = (pair.before[row], pair.after[row])
        texts = [
            answer._replace(name=f"{answer.name}, mean {figure} {points(mean)}%; its first run")
            for answer, mean in zip(answers, means, strict=True)
        ]
        named.append((query, texts))
    return named
