"""Two sides compared on the queries that both have: differences, what was left out, and a verdict.

A side is a network, or the runs of a training from several seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.evaluation.comparing import FEW_CLASSES, RESAMPLES, Difference, corrected, differences
from distap.evaluation.query_values import QueryValues
from distap.evaluation.row_folder import NAMED, refuse_repeated_images

DOMAIN = "domain"
RIGHT_IMAGES = "right images of a query"


@dataclass(frozen=True)
class Side:
    """The queries of one or several runs."""

    name: str
    runs: tuple[QueryValues, ...]

    def shared(self, column: str) -> list[str]:
        """Return the names that all runs have, of their queries (`key`) or of figures."""
        columns = [getattr(values, column).tolist() for values in self.runs]
        common = {*columns[0]}.intersection(*columns)
        return [name for name in columns[0] if name in common]

    def of(
        self, keys: Sequence[str], figures: Sequence[str]
    ) -> tuple[Int64[np.ndarray, " Q"], Float64[np.ndarray, "S Q F"]]:
        """Return the rows of some queries in the first run, and their figures in each."""
        rows = [_places(values.key, keys) for values in self.runs]
        tables = [
            values.values[run_rows][:, _places(values.figure, figures)]
            for run_rows, values in zip(rows, self.runs, strict=True)
        ]
        return rows[0], np.stack(tables)


@dataclass(frozen=True)
class Compared:
    """A side next to its baseline."""

    baseline: Side
    other: Side
    overall: list[Difference]  # of each figure, the one that the verdict is about first
    # of the first figure, by kind of breakdown, and by domain or number of right images
    breakdowns: dict[str, dict[str, Difference]]
    notes: list[str]  # what was left out, and what limits the result
    # Of Q queries that both sides answered: names, classes, and the first figure by both.
    key: NDArray[np.str_]
    class_name: NDArray[np.str_]
    before: Float64[np.ndarray, " Q"]
    after: Float64[np.ndarray, " Q"]

    @property
    def verdict(self) -> str:
        """Return in words which side is better on the first figure, and on which others."""
        first = self.overall[0]
        tested = f"p {shown_p(first.corrected)}"
        if len(self.overall) > 1:
            tested += f" after Holm over {len(self.overall)} figures"
        doubt = f"95% interval {shown_interval(first)}, {tested}"
        if first.holds:
            direction = "better" if first.value > 0 else "worse"
            size = points(abs(first.value))
            text = f"{self.other.name} is {direction} on {first.figure} by {size} points ({doubt})"
        else:
            text = (
                f"no difference is shown on {first.figure} between {self.other.name} and"
                f" {self.baseline.name}: {points(first.value, signed=True)} points ({doubt})"
            )
        for direction, sign in (("better", 1), ("worse", -1)):
            names = [
                result.figure
                for result in self.overall[1:]
                if result.holds and result.value * sign > 0
            ]
            text += f"; {direction} on {', '.join(names)}" if names else ""
        return text


def compared(
    baseline: Side,
    other: Side,
    *,
    asked: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Compared:
    """Compare two sides on the queries and figures that both have.

    Args:
        asked: figures to compare, the one that the verdict is about first; none takes all.
    Raises:
        DistapError: they share no query or no figure, or none that was asked for, or the name of a
            query stands twice.
    """
    sides = (baseline, other)
    for side in sides:
        for values in side.runs:
            refuse_repeated_images(values.key, f"the queries of {side.name}")
    keys = _shared(sides, "key", "queries")
    figures = _shared(sides, "figure", "figures")
    notes = [*_left_out(sides, "key", "queries", keys)]
    if asked:
        figures = _asked(asked, figures)
    else:
        notes += _left_out(sides, "figure", "figures", figures)
    rows, before = baseline.of(keys, figures)
    other_rows, after = other.of(keys, figures)
    first = baseline.runs[0]
    class_name = first.class_name[rows]
    positives = first.positives[rows]
    test = partial(differences, resamples=resamples, seed=seed)
    # The same seed flips the same classes for every figure, so that figures that are equal, such as
    # R@1 and mP@1, get equal intervals.
    overall = test(figures, before, after, _numbers(class_name))

    is_answered = ~np.isnan(before[:, :, 0]).any(0) & ~np.isnan(after[:, :, 0]).any(0)
    kinds = {DOMAIN: first.part[rows], RIGHT_IMAGES: _sizes(positives)}
    breakdowns = {
        kind: _broken_down(
            lambda chosen: test(
                figures[:1],
                before[:, chosen, :1],
                after[:, chosen, :1],
                _numbers(class_name[chosen]),
            ),
            np.where(is_answered, names, ""),
            positives,
        )
        for kind, names in kinds.items()
    }
    changed = np.array(keys)[positives != other.runs[0].positives[other_rows]].tolist()
    notes += _limits(sides, changed, overall[0].classes)
    return Compared(
        baseline,
        other,
        overall,
        {kind: results for kind, results in breakdowns.items() if len(results) > 1},
        notes,
        key=np.array(keys)[is_answered],
        class_name=class_name[is_answered],
        before=before[:, is_answered, 0].mean(0),
        after=after[:, is_answered, 0].mean(0),
    )


def _broken_down(
    test: Callable[[Bool[np.ndarray, " Q"]], list[Difference]],
    names: NDArray[np.str_],
    positives: Int64[np.ndarray, " Q"],
) -> dict[str, Difference]:
    """Test the queries of each name apart, and correct the p-values for all of them."""
    ordered = dict.fromkeys(names[np.argsort(positives, kind="stable")].tolist())
    results = {name: test(names == name)[0] for name in ordered if name}
    return dict(zip(results, corrected([*results.values()]), strict=True))


def _limits(sides: Sequence[Side], changed: list[str], classes: int) -> Iterator[str]:
    """Yield what limits the result. `changed` are queries whose right images differ."""
    if changed:
        yield (
            f"{len(changed):,} queries have other numbers of right images in {sides[1].name}"
            f"{_examples(changed)}: the galleries differ, which is part of the difference"
        )
    if classes < FEW_CLASSES:
        yield (
            f"there are {classes} classes: with fewer than {FEW_CLASSES}, intervals and p-values"
            " are doubtful"
        )
    if all(len(side.runs) == 1 for side in sides):
        yield (
            "one run a side: the interval is about these two networks, and does not tell how much"
            " another seed would change"
        )


def _shared(sides: Sequence[Side], column: str, noun: str) -> list[str]:
    """Return the names of queries or figures that all runs of both sides have."""
    names_of = [side.shared(column) for side in sides]
    is_there = {*names_of[1]}
    shared = [name for name in names_of[0] if name in is_there]
    if not shared:
        examples = " and ".join(
            f"{side.name} has {len(names):,}{_examples(names)}"
            for side, names in zip(sides, names_of, strict=True)
        )
        raise DistapError(
            "comparison.nothing_shared",
            f"both sides share no {noun}: {examples}: evaluate both on one data set",
        )
    return shared


def _asked(asked: Sequence[str], shared: Sequence[str]) -> list[str]:
    """Return the figures that were asked for in their order, each with those of its levels."""
    chosen = {
        figure: [name for name in shared if name == figure or name.endswith(f" {figure}")]
        for figure in asked
    }
    missing = [figure for figure, names in chosen.items() if not names]
    if missing:
        raise DistapError(
            "comparison.no_figure",
            f"{', '.join(missing)}: not a figure of every run; all have {', '.join(shared)}",
        )
    return list(dict.fromkeys(name for names in chosen.values() for name in names))


def _left_out(sides: Sequence[Side], column: str, noun: str, shared: list[str]) -> Iterator[str]:
    """Yield a line for each side with queries or figures that a run of either side lacks."""
    is_shared = {*shared}
    for side in sides:
        names = {name: None for values in side.runs for name in getattr(values, column).tolist()}
        lost = [name for name in names if name not in is_shared]
        if lost:
            yield (
                f"{len(lost):,} of the {len(names):,} {noun} of {side.name} are left out, since"
                f" another run lacks them{_examples(lost)}"
            )


def _places(column: NDArray[np.str_], names: Sequence[str]) -> Int64[np.ndarray, " n"]:
    places = {name: place for place, name in enumerate(column.tolist())}
    return np.array([places[name] for name in names], np.int64)


def _numbers(class_name: NDArray[np.str_]) -> Int64[np.ndarray, " Q"]:
    numbers: Int64[np.ndarray, " Q"] = np.unique(class_name, return_inverse=True)[1]
    return numbers


def _sizes(positives: Int64[np.ndarray, " Q"]) -> NDArray[np.str_]:
    """Name the number of right images by powers of two: 1, 2 to 3, 4 to 7 and so on."""
    names = ["", "1"] + [f"{2**power:,} to {2 ** (power + 1) - 1:,}" for power in range(1, 63)]
    return np.array([names[count.bit_length()] for count in positives.tolist()])


def _examples(names: Sequence[str]) -> str:
    return f", such as {', '.join(names[:NAMED])}" if names else ""


def points(share: float, signed: bool = False) -> str:
    """Return a share in points of a percent, with two digits if it is below a tenth."""
    digits = 2 if 0 < abs(share) < 0.001 else 1
    return f"{100 * share:{'+' if signed else ''}.{digits}f}"


def shown_p(p: float) -> str:
    """Return a p-value with its sign, such as `= 0.032` or `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.0995 else f"= {p:.2f}"


def shown_interval(result: Difference) -> str:
    """Return the interval in points."""
    if not np.isfinite([result.low, result.high]).all():
        return "unbounded, of too few classes"
    return f"{points(result.low)} to {points(result.high)}"
