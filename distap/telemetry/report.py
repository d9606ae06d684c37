"""The report page of a run."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from distap.telemetry.charts import MOST_POINTS, Series, line_chart, percent, plain, stacked_bars
from distap.telemetry.page import write_page

STAGES = ("describe", "replay", "rank", "gather", "reduce", "data_wait", "optimizer", "other")


@dataclass(frozen=True)
class Hit:
    """One retrieved image: a JPEG thumbnail, and whether it is of the query's class."""

    key: str
    picture: bytes
    right: bool


@dataclass(frozen=True)
class Example:
    """A query, and what was retrieved for it before and after training, best first."""

    key: str
    label: str
    picture: bytes
    before: list[Hit]
    after: list[Hit]


def write_report(
    path: Path,
    *,
    title: str,
    steps: list[dict[str, Any]],
    validations: list[dict[str, Any]],
    before: dict[str, float] | None,
    after: dict[str, float] | None,
    examples: list[Example],
    facts: dict[str, str],
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: of the HTML file.
        title: heading of the page.
        steps: lines of the run's log for training steps.
        validations: lines of the run's log for evaluations; step 0 is before training.
        before, after: figures by name, from 0 to 1.
        examples: queries to show.
        facts: what to say of the run at the top.
    """
    sections = [
        _facts(facts),
        _figures(before, after),
        _curves(steps, validations),
        _seconds(steps),
        _examples(examples),
    ]
    write_page(path, title, "".join(sections))


def _facts(facts: dict[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>\n"


def _figures(before: dict[str, float] | None, after: dict[str, float] | None) -> str:
    if not before or not after:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{100 * before[name]:.1f}</td><td>{100 * after[name]:.1f}</td>"
        f'<td class="gain">{100 * (after[name] - before[name]):+.1f}</td>'
        f'<td class="bars"><div class="bar before" style="width:{100 * before[name]:.1f}%"></div>'
        f'<div class="bar after" style="width:{100 * after[name]:.1f}%"></div></td></tr>'
        for name in before
        if name in after
    )
    return (
        "<h2>Before and after training</h2><table><thead><tr><th></th><th>before, %</th><th>after, %</th>"
        f"<th>gain</th><th></th></tr></thead><tbody>{rows}</tbody></table>\n"
        '<p class="note">Every image is a query against all others. mAP is the mean over queries of the finite sum '
        "of precision at the ranks of the positives; mAP@R stops at the number of positives; R@k is the share of "
        "queries with a positive among the first k. A positive ranks after the negatives it ties with.</p>\n"
    )


def _curves(steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]]) -> str:
    if not steps:
        return '<h2>Training</h2><p class="none">No training step has been logged.</p>\n'
    scores = []
    of_batches = _points(steps, "batch_mAP")
    if any(math.isfinite(value) for _, value in of_batches):
        scores.append(Series("batch (1 - loss)", of_batches))
    if validations:
        of_validation = [(float(entry["step"]), _number(entry["validation"]["mAP"])) for entry in validations]
        scores.append(Series("validation (mAP)", of_validation, marked=True))
    charts = [
        ("Loss of the global batch", line_chart([Series("loss", _points(steps, "loss"))], "loss")),
        *([("Mean Average Precision", line_chart(scores, "mAP", percent))] if scores else []),
        ("Images a second, all ranks", _chart(steps, "images_per_second", from_zero=True)),
        ("Learning rate", _chart(steps, "learning_rate", from_zero=True)),
        ("Norm of the gradient", _chart(steps, "gradient_norm", from_zero=True)),
        ("Replay drift, between an image's two descriptors", _chart(steps, "replay_drift", from_zero=True)),
    ]
    thinned = (
        f'<p class="note">{len(steps)} steps: each point is the mean of an interval.</p>'
        if len(steps) > MOST_POINTS
        else ""
    )
    return f"<h2>Training</h2>{_grid(charts)}{thinned}\n"


def _seconds(steps: Sequence[dict[str, Any]]) -> str:
    if not steps:
        return ""
    layers = {name: [_number(entry["seconds"].get(name, 0.0)) for entry in steps] for name in STAGES}
    layers = {name: values for name, values in layers.items() if any(values)}
    totals = {name: sum(values) for name, values in layers.items()}
    whole = sum(totals.values())
    network = sum(_number(entry["seconds"]["network"]) for entry in steps)
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{total:.1f}</td><td>{total / len(steps):.3f}</td>"
        f"<td>{100 * total / whole:.1f}</td></tr>"
        for name, total in totals.items()
    )
    positions = [float(entry["step"]) for entry in steps]
    table = (
        "<table><thead><tr><th>stage</th><th>seconds</th><th>a step</th><th>%</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        f"<p>{100 * (1 - network / whole):.1f}% of a step is outside the network's own forward and backward.</p>"
    )
    charts = [("Seconds of a step by stage, rank 0", stacked_bars(positions, layers, "seconds")), ("Totals", table)]
    return f"<h2>Where the time goes</h2>{_grid(charts)}\n"


def _examples(examples: Sequence[Example]) -> str:
    if not examples:
        return ""
    return (
        "<h2>Neighbours before and after</h2>"
        '<p class="note">Queries drawn at random, each with its nearest images, best first: of the query\'s class '
        "framed green (✓), others red (✗).</p>" + "".join(_example(example) for example in examples)
    )


def _example(example: Example) -> str:
    rows = "".join(
        f'<div class="row"><p class="note">{when}: {sum(hit.right for hit in hits)} of {len(hits)} right</p>'
        f'<div class="hits">{"".join(_hit(hit) for hit in hits)}</div></div>'
        for when, hits in (("before", example.before), ("after", example.after))
    )
    return (
        f'<div class="example"><div class="query">{_image(example.picture, example.key)}'
        f"<b>{escape(example.label)}</b></div><div>{rows}</div></div>\n"
    )


def _hit(hit: Hit) -> str:
    kind, mark = ("right", "✓") if hit.right else ("wrong", "✗")
    return f'<div class="hit {kind}">{_image(hit.picture, hit.key)}<span>{mark}</span></div>'


def _image(jpeg: bytes, key: str) -> str:
    data = base64.b64encode(jpeg).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{escape(key)}" title="{escape(key)}" loading="lazy">'


def _grid(charts: Sequence[tuple[str, str]]) -> str:
    figures = "".join(f"<figure><h3>{escape(title)}</h3>{chart}</figure>" for title, chart in charts)
    return f'<div class="charts">{figures}</div>'


def _chart(steps: Sequence[dict[str, Any]], name: str, from_zero: bool) -> str:
    return line_chart([Series(name, _points(steps, name))], name.replace("_", " "), plain, from_zero)


def _points(steps: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(entry["step"]), _number(entry.get(name))) for entry in steps]


def _number(value: float | None) -> float:
    """The run's log writes numbers that are not finite as null."""
    return math.nan if value is None else float(value)
