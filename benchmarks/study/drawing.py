"""Draw the figures of a study: a dot with its interval for each row, or lines over the names of an
axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader, PackageLoader

from distap.pages.charts import ticks
from distap.pages.page import TEMPLATES

# of the drawing, in its own units
ROW = 26
LEFT = 190
RIGHT = 30
TOP = 34
WIDTH = 680
PLOT_HEIGHT = 300
LEFT_OF_PLOT = 60
# The study's own templates, which build on those of distap's pages.
OWN = TEMPLATES.overlay(
    loader=ChoiceLoader([FileSystemLoader(Path(__file__).parent), PackageLoader("distap.pages")])
)


def text_of(template: str, **values: Any) -> str:
    """Fill in a template; every value is escaped."""
    return OWN.get_template(template).render(values, pictures={})


@dataclass(frozen=True)
class Mark:
    """A figure in percent with half of its interval, 0 if there is none."""

    name: str
    mean: float
    half: float = 0.0


def dots_svg(title: str, marks: Sequence[Mark], before: float | None = None) -> str:
    """An SVG file with a row for each mark, the highest first, and a line at what was reached
    before training.
    """
    marks = sorted(marks, key=lambda mark: -mark.mean)
    scale = _Scale(
        [*marks, *([Mark("", before)] if before is not None else [])], LEFT, WIDTH - RIGHT
    )
    rows = [
        (
            mark.name,
            TOP + (k + 0.5) * ROW,
            *map(scale, (mark.mean - mark.half, mark.mean, mark.mean + mark.half)),
            mark,
        )
        for k, mark in enumerate(marks)
    ]
    bottom = TOP + ROW * len(marks)
    line = None if before is None else scale(before)
    return text_of(
        "study.svg",
        title=title,
        width=WIDTH,
        height=bottom + 34,
        rows=rows,
        top=TOP,
        bottom=bottom,
        before=line,
        ticks=scale.marks(),
        series=[],
        names=[],
        left=LEFT,
        right=WIDTH - RIGHT,
    )


def lines_svg(
    title: str, x_label: str, names: Sequence[str], series: Mapping[str, Sequence[Mark | None]]
) -> str:
    """An SVG file with a line for each series, over equally spaced `names`.

    A mark that is None is left out.
    """
    marks = [mark for line in series.values() for mark in line if mark is not None]
    bottom = TOP + PLOT_HEIGHT
    right = WIDTH - RIGHT
    scale = _Scale(marks, bottom, TOP)
    places = [
        LEFT_OF_PLOT + (k + 0.5) * (right - LEFT_OF_PLOT) / len(names) for k in range(len(names))
    ]
    drawn = []
    for number, (name, line) in enumerate(series.items()):
        aside = 5 * (number - (len(series) - 1) / 2)  # so that intervals do not hide each other
        points = [
            (
                x + aside,
                *map(scale, (mark.mean - mark.half, mark.mean, mark.mean + mark.half)),
                mark,
            )
            for x, mark in zip(places, line, strict=True)
            if mark is not None
        ]
        drawn.append((name, points))
    height = bottom + 62 + 20 * ((len(series) + 2) // 3)
    return text_of(
        "study.svg",
        title=title,
        width=WIDTH,
        height=height,
        rows=[],
        top=TOP,
        bottom=bottom,
        before=None,
        ticks=scale.marks(),
        series=drawn,
        names=list(zip(places, names, strict=True)),
        left=LEFT_OF_PLOT,
        right=right,
        x_label=x_label,
    )


class _Scale:
    """Places between `start` and `end` for values of marks."""

    def __init__(self, marks: Sequence[Mark], start: float, end: float) -> None:
        low = min(mark.mean - mark.half for mark in marks)
        high = max(mark.mean + mark.half for mark in marks)
        margin = 0.06 * (high - low) or 1.0
        self._low = low - margin
        self._high = high + margin
        self._start = start
        self._end = end

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (
            self._end - self._start
        )

    def marks(self) -> list[tuple[float, str]]:
        return [(self(value), f"{value:.4g}") for value in ticks(self._low, self._high)]
