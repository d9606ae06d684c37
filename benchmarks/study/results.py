"""What the trainings of a study reached: means over seeds, their intervals, differences, tables and
a page.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from benchmarks.study.drawing import Mark, dots_svg, lines_svg, text_of
from benchmarks.study.grid import HEADLINE, Grid, Job, Point, Study
from distap.errors import DistapError, suggestion
from distap.storage.atomic import write_whole

# Student's t for 95% of both sides, by degrees of freedom from 1 on; beyond these the last is a
# little too large.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MOST_APART = 0.1  # of seconds that a study calls equal
BEFORE = "before training"
PAGE = "study.html"


@dataclass(frozen=True)
class Result:
    """A line of results.jsonl says what one training reached."""

    names: dict[str, str]  # of its point, by axis
    searched: dict[str, Any]
    seed: int
    fingerprint: str  # of its recipe
    figures: dict[str, float]  # SET/FIGURE of the last evaluation, 0 to 1
    before: dict[str, float]  # of the evaluation before the first step, if there was one
    steps: int
    images: int  # seen, with repetitions
    seconds: float  # of all steps
    # of the training with start and evaluations; if it was resumed, since then
    processor_seconds: float
    memory_bytes: int  # at most, of a process
    # date, versions, ranks, threads, trainings at once
    made: dict[str, Any] = field(default_factory=dict)


class Interval(NamedTuple):
    """A mean, and half of its 95% interval by Student's t; None of a single value."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.half is None else f" ± {100 * self.half:.1f}")


def interval(values: Sequence[float]) -> Interval:
    """The mean of one value or more, with its interval."""
    if len(values) < 2:
        return Interval(values[0], None)
    return Interval(fmean(values), student(len(values)) * stdev(values) / math.sqrt(len(values)))


def student(count: int) -> float:
    """Student's t of the 95% interval of a mean of `count` values, 2 or more."""
    return STUDENT[min(count - 1, len(STUDENT)) - 1]


def read_results(path: Path) -> list[Result]:
    """Read the lines of a study's results; a last line that was cut short is left out."""
    lines = path.read_text().splitlines() if path.is_file() else []
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise DistapError(
                    "run.wrong_result",
                    f"{path}, line {number}: not the result of a training: {error}",
                ) from error
    return results


@dataclass(frozen=True)
class Row:
    """A point of a study with the trainings that count: those with the best of the searched values,
    by seed.
    """

    point: Point
    results: list[Result]
    # keys whose best value is the first or last of those that were searched
    at_edge: frozenset[str]

    def values(self, figure: str) -> dict[int, float]:
        """Return the values of a figure by seed."""
        return {result.seed: result.figures[figure] for result in self.results}

    def interval(self, figure: str) -> Interval:
        return interval(list(self.values(figure).values()))

    def difference(self, other: "Row", figure: str) -> Interval | None:
        """The mean of the differences to another row, seed by seed; None if they share no seed."""
        own_values = self.values(figure)
        other_values = other.values(figure)
        shared = [
            own_values[seed] - other_values[seed] for seed in own_values if seed in other_values
        ]
        return interval(shared) if shared and self is not other else None


class Results:
    """The results of a study's trainings, by point and recipe."""

    def __init__(self, grid: Grid, seeds: int, done: Iterable[Result] = ()) -> None:
        self.grid = grid
        self.seeds = seeds
        self._done = {(_names(result.names), result.fingerprint): result for result in done}

    @property
    def done(self) -> list[Result]:
        return list(self._done.values())

    def add(self, result: Result) -> None:
        self._done[_names(result.names), result.fingerprint] = result

    def of(self, job: Job) -> Result | None:
        """Return the result of a training that is done.

        A DistapError names a figure that it lacks.
        """
        result = self._done.get((_names(job.point.names), job.fingerprint))
        if result is not None:
            require_figures(self.grid, job, result.figures)
        return result

    def best(self, point: Point) -> Result | None:
        """Return the training with the best of the searched values.

        None until all of them are tried.
        """
        tried = [self.of(job) for job in self.grid.jobs(point, 0)]
        by = self.grid.chosen_by
        done = [result for result in tried if result is not None]
        return max(done, key=lambda result: result.figures[by]) if len(done) == len(tried) else None

    def rows(self) -> list[Row]:
        """Return a row for each point whose search is done."""
        rows = []
        for point in self.grid.points:
            best = self.best(point)
            if best is None:
                continue
            jobs = [self.grid.jobs(point, seed, best.searched)[0] for seed in range(self.seeds)]
            done = [result for job in jobs if (result := self.of(job)) is not None]
            search = {key: values for key, values in self.grid.study.search.items() if values[1:]}
            edges = {
                key
                for key, values in search.items()
                if best.searched[key] in (values[0], values[-1])
            }
            rows.append(Row(point, done, frozenset(edges)))
        return rows

    def before(self) -> Mapping[str, float]:
        """Return the figures of the network that all trainings begin with.

        None if there is no such network.
        """
        jobs = (
            (job for point in self.grid.points for job in self.grid.jobs(point, 0))
            if self.share_a_start
            else ()
        )
        results = filter(None, map(self.of, jobs))  # not of settings that the study had before
        return next((result.before for result in results if result.before), {})

    @property
    def share_a_start(self) -> bool:
        return {"data", "model", "evaluation"} <= {*self.grid.study.equal}


def require_figures(grid: Grid, job: Job, values: Mapping[str, float | None]) -> None:
    """Raise a DistapError if a training lacks a figure of the study; `values` are by SET/FIGURE."""
    known = [name for name, value in values.items() if value is not None]
    for key, names in (("chosen_by", [grid.chosen_by]), ("figures", grid.study.figures)):
        for name in names:
            if name not in known:
                raise DistapError(
                    "evaluation.unknown_figure",
                    f"{key}: {job} has no {name}; {suggestion(name, known)}",
                )


def _names(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(names.items())


def table(results: Results) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headings, rows of cells and notes: figures in percent with their 95% intervals over
    seeds.
    """
    study = results.grid.study
    rows = results.rows()
    first = study.figures[0]
    searched = list(study.search)
    counterparts = [_counterpart(row, rows, study) for row in rows]
    headings = [
        *study.axes,
        *(key.rpartition(".")[2].replace("_", " ") for key in searched),
        *study.figures,
    ]
    headings += [f"{first}, less {study.against}"] if any(counterparts) else []
    sizes = {
        "updates": [f"{row.results[0].steps:,}" for row in rows],
        "images": [f"{row.results[0].images:,}" for row in rows],
        "processor s": [
            f"{median(result.processor_seconds for result in row.results):.0f}" for row in rows
        ],
        "GB": [f"{max(result.memory_bytes for result in row.results) / 1e9:.1f}" for row in rows],
    }
    alike = {
        name: sizes.pop(name)[0] for name in ("updates", "images") if len(set(sizes[name])) == 1
    }
    headings += sizes
    cells = []
    before = results.before()
    if before:
        blank = [""] * (len(study.axes) - 1 + len(searched))
        cells.append(
            [BEFORE, *blank, *(str(Interval(before[name], None)) for name in study.figures)]
        )
        cells[0] += [""] * (len(headings) - len(cells[0]))
    for row, other, *own_sizes in zip(rows, counterparts, *sizes.values(), strict=True):
        chosen = [
            _short(row.results[0].searched[key]) + ("*" if key in row.at_edge else "")
            for key in searched
        ]
        apart = (
            [_signed(row.difference(other, first) if other else None)] if any(counterparts) else []
        )
        figures = [str(row.interval(name)) for name in study.figures]
        cells.append([*row.point.names.values(), *chosen, *figures, *apart, *own_sizes])
    return headings, cells, list(_notes(results, rows, alike))


def _counterpart(row: Row, rows: Sequence[Row], study: Study) -> Row | None:
    """Return the row that differs from this one in its name on the first axis alone, which is
    `against`.
    """
    names = {**row.point.names, next(iter(study.axes)): study.against}
    return next((other for other in rows if other.point.names == names), None)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _signed(difference: Interval | None) -> str:
    return "" if difference is None else f"{'+' if difference.mean >= 0 else ''}{difference}"


def _notes(results: Results, rows: Sequence[Row], alike: Mapping[str, str]) -> Iterable[str]:
    """`alike` holds the updates or images that all rows share, which have no column."""
    study = results.grid.study
    seeds = " or ".join(map(str, sorted({len(row.results) for row in rows})))
    several = f"mean of {seeds} seeds ± half of its 95% interval"
    yield f"Percent, {'of one seed' if seeds == '1' else several}."
    equal = [name for name in study.equal if name not in alike]
    yield (
        "Equal for all:"
        f" {', '.join([*equal, *(f'{count} {name}' for name, count in alike.items())])}."
    )
    if study.search:
        keys = ", ".join(
            f"{key} of {', '.join(map(_short, values))}" for key, values in study.search.items()
        )
        name, _, figure = results.grid.chosen_by.partition("/")
        chosen_on = "data.validation" if name == HEADLINE else name
        yield f"The best {keys} by {figure} on {chosen_on}, with seed 0."
    if any(row.at_edge for row in rows):
        yield "* the first or the last value that was tried."
    seconds = {
        str(row.point): median(result.processor_seconds for result in row.results) for row in rows
    }
    if "seconds" in study.equal and seconds:
        middle = median(seconds.values())
        apart = [
            f"{name} {s / middle:.2f}"
            for name, s in seconds.items()
            if abs(s / middle - 1) > MOST_APART
        ]
        if apart:
            yield (
                f"Processor seconds are not within {MOST_APART:.0%} of their median:"
                f" {', '.join(apart)} times."
            )


def comparison(results: Results, published: Results) -> list[str]:
    """Compare with published results: whether each mean lies in the interval where they expect it.

    A mean of n seeds is expected within t s sqrt(1/m + 1/n) of the published mean of m seeds with
    deviation s.
    """
    figure = results.grid.study.figures[0]
    theirs = {_names(row.point.names): row for row in published.rows()}
    lines = []
    for row in results.rows():
        other = theirs.get(_names(row.point.names))
        if other is None or len(other.results) < 2:
            continue
        own_values = list(row.values(figure).values())
        other_values = list(other.values(figure).values())
        half = (
            student(len(other_values))
            * stdev(other_values)
            * math.sqrt(1 / len(other_values) + 1 / len(own_values))
        )
        verdict = "within" if abs(fmean(own_values) - fmean(other_values)) <= half else "NOT within"
        expected = Interval(fmean(other_values), half)
        lines.append(
            f"{row.point}: {figure} {interval(own_values)}, {verdict} {expected},"
            " which the published runs expect"
        )
    if published.done and not lines:
        return [
            "nothing was published with these settings and two seeds or more: no mean is compared"
        ]
    return lines


def drawing_title(results: Results) -> str:
    study = results.grid.study
    is_dashed = len(study.axes) == 1 and results.before().get(study.figures[0]) is not None
    title = f"{study.title}: {study.figures[0]}, %"
    return f"{title} (dashed: before training)" if is_dashed else title


def drawing(results: Results) -> str:
    """Draw the first figure as an SVG file: lines over the last of several axes, or a dot for each
    point.
    """
    study = results.grid.study
    rows = results.rows()
    figure = study.figures[0]
    before = results.before().get(figure)
    title = drawing_title(results)
    marks = {tuple(row.point.names.values()): _mark(row, figure) for row in rows}
    if len(study.axes) == 1:
        return dots_svg(title, list(marks.values()), None if before is None else 100 * before)
    last = list(dict.fromkeys(names[-1] for names in marks))
    lines = dict.fromkeys(names[:-1] for names in marks)
    series = {", ".join(line): [marks.get((*line, name)) for name in last] for line in lines}
    return lines_svg(title, list(study.axes)[-1], last, series)


def _mark(row: Row, figure: str) -> Mark:
    mean, half = row.interval(figure)
    return Mark(list(row.point.names.values())[-1], 100 * mean, 100 * (half or 0))


def markdown(results: Results) -> str:
    """The table of `table` in Markdown, with its notes."""
    headings, cells, notes = table(results)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *cells]
    rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return "\n".join(f"| {row} |" for row in rows) + "\n\n" + "\n".join(notes) + "\n"


def write_study(results: Results, file: Path) -> Path:
    """Write table, drawing and page of a study into its folder; return the path of the page."""
    folder = results.grid.folder
    study = results.grid.study
    page = results.grid.folder / PAGE
    headings, cells, notes = table(results)
    svg = drawing(results)
    write_whole(folder / "table.md", markdown(results))
    write_whole(folder / "figure.svg", svg)
    made = [result.made for result in results.done]
    facts = (
        {key: ", ".join(sorted({str(machine.get(key)) for machine in made})) for key in made[0]}
        if made
        else {}
    )
    texts = {"title": study.title, "about": study.about, "source": file.read_text(encoding="utf-8")}
    write_whole(
        page,
        text_of(
            "study.html",
            drawing=svg,
            drawing_title=drawing_title(results),
            headings=headings,
            cells=cells,
            notes=notes,
            made=facts,
            **texts,
        ),
    )
    return page
