"""What networks scored, side by side: figures, precision over recall, the classes that score lowest."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from distap.pages.charts import Series, line_chart, percent
from distap.pages.markup import figures, gain_cell, note, percent_cell, table

LOWEST = 12
DEFINITIONS = (
    "Every image is a query against all others. mAP is the mean over queries of the finite sum of precision at the "
    "ranks of the positives; mAP@R stops at the number of positives; R@k is the share of queries with a positive "
    "among the first k, mP@k the mean share of positives among them. A positive ranks after the negatives it ties "
    "with."
)


@dataclass(frozen=True)
class Scores:
    """A network's figures on a data set, from 0 to 1."""

    name: str  # of the network, such as "before"
    figures: dict[str, float]
    precision_at_recall: Sequence[float]  # at recall 0, 0.01 ... 1; may be empty
    query_precisions: Sequence[float]  # AP of each query
    classes: dict[str, dict[str, float]]  # queries and mAP of each class; may be empty


def figures_table(scores: Sequence[Scores], title: str, gain_name: str = "gain") -> str:
    """The section of the figures; with two networks, how much more the second has."""
    if not scores:
        return ""
    names = list(dict.fromkeys(name for each in scores for name in each.figures))
    heading = ["figure", *(f"{each.name}, %" for each in scores), *([gain_name] if len(scores) == 2 else []), ""]
    rows = []
    for name in names:
        values = [each.figures.get(name) for each in scores]
        gain = [gain_cell(*values)] if len(values) == 2 else []
        rows.append([escape(name), *map(percent_cell, values), *gain, _bars(values)])
    return f"<h2>{escape(title)}</h2>\n{table(heading, rows)}{note(DEFINITIONS)}"


def precision_over_recall(scores: Sequence[Scores]) -> str:
    """The section of the precision-recall curves, and of how AP is spread over the queries."""
    charts = {
        "Precision over recall": (
            [_curve(each.name, each.precision_at_recall) for each in scores],
            "precision",
            "recall, %",
        ),
        "Queries that reach an AP": (
            [_curve(each.name, _reached(each)) for each in scores],
            "share of queries",
            "AP at least, %",
        ),
    }
    drawn = [
        (title, line_chart(series, y_label, percent, from_zero=True, x_label=x_label))
        for title, (series, y_label, x_label) in charts.items()
        if any(one.points for one in series)
    ]
    if not drawn:
        return ""
    about = "Precision is the greatest at any recall at least as high, mean over the queries."
    return f"<h2>Precision and recall</h2>\n{figures(drawn)}{note(about)}"


def _curve(name: str, of_percent: Sequence[float]) -> Series:
    return Series(name, [(float(percent), value) for percent, value in enumerate(of_percent)])


def _reached(scores: Scores) -> list[float]:
    """Share of the queries whose AP is at least 0, 0.01 ... 1."""
    ascending, count = sorted(scores.query_precisions), len(scores.query_precisions)
    return [(count - bisect_left(ascending, level / 100)) / count for level in range(101)] if count else []


def lowest_classes(scores: Sequence[Scores], gain_name: str = "gain") -> str:
    """The section of the classes with the lowest mAP of the last network."""
    of_last = scores[-1].classes if scores else {}
    lowest = sorted(of_last, key=lambda name: (of_last[name].get("mAP", 1.0), name))[:LOWEST]
    if not lowest:
        return ""
    gains = [gain_name] if len(scores) == 2 else []
    rows = []
    for name in lowest:
        values = [each.classes.get(name, {}).get("mAP") for each in scores]
        gain = [gain_cell(*values)] if gains else []
        rows.append([escape(name), f"{of_last[name].get('queries', 0):,.0f}", *map(percent_cell, values), *gain])
    heading = ["class", "queries", *(f"{each.name}: mAP, %" for each in scores), *gains]
    about = f"The lowest mAP over a class's queries, of {len(of_last):,} classes ({scores[-1].name})."
    return f"<h2>Classes with the lowest mAP</h2>\n{note(about)}{table(heading, rows)}"


def _bars(values: Sequence[float | None]) -> str:
    bars = "".join(
        f'<div class="bar b{number % 9}" style="width:{100 * (value or 0.0):.1f}%"></div>'
        for number, value in enumerate(values)
    )
    return f'<div class="bars" aria-hidden="true">{bars}</div>'
