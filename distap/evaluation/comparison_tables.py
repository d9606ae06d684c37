"""Comparisons as tables, as papers print them, and as records for programs."""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from distap.errors import DistapError
from distap.evaluation.compared_queries import Compared, points, shown_interval, shown_p
from distap.evaluation.comparing import Difference

TABLE_FORMS = ("latex", "markdown", "csv")
LATEX_SIGNS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
# A row of a table: kind of breakdown and its part, both "" for all queries, and a difference.
Row = tuple[str, str, Difference]


def comparison_rows(pair: Compared) -> Iterator[Row]:
    """Yield the differences of all queries, then those of each part of a breakdown."""
    for result in pair.overall:
        yield "", "", result
    for kind, results in pair.breakdowns.items():
        for name, result in results.items():
            yield kind, name, result


def require_form(form: str) -> None:
    if form not in TABLE_FORMS:
        raise DistapError(
            "comparison.unknown_table", f"table {form!r}: expected {', '.join(TABLE_FORMS)}"
        )


def comparison_table(pairs: Sequence[Compared], form: str) -> str:
    """Return a table as text, of rows for all queries and for each part of the breakdowns.

    Raises:
        DistapError: there is no such form.
    """
    require_form(form)
    if form == "csv":
        return _csv(pairs)
    tables = [_latex(pair) if form == "latex" else _markdown(pair) for pair in pairs]
    return "\n\n".join(tables)


def shown_rows(pair: Compared) -> Iterator[list[str]]:
    """Yield rows of cells: what was compared, both means in percent, difference, interval and p."""
    for kind, name, result in comparison_rows(pair):
        yield [
            f"{result.figure}, {kind}: {name}" if kind else result.figure,
            points(result.baseline),
            points(result.other),
            points(result.value, signed=True) + ("*" if result.holds else ""),
            shown_interval(result),
            shown_p(result.corrected).removeprefix("= "),
            f"{result.queries:,} in {result.classes:,}",
        ]


def headings(pair: Compared) -> list[str]:
    other = pair.other.name
    names = ["figure, %", pair.baseline.name, other, "difference", "95% interval", "p (Holm)"]
    return [*names, "queries in classes"]


def _markdown(pair: Compared) -> str:
    names, *rows = (
        [cell.replace("|", r"\|") for cell in cells]
        for cells in (headings(pair), *shown_rows(pair))
    )
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _latex(pair: Compared) -> str:
    names = headings(pair)[:-1]
    rows = []
    for cells in shown_rows(pair):
        # LaTeX prints - as a hyphen and < as an upside-down exclamation mark, but in mathematics.
        numbers = [re.sub(r"<|-[\d.]+", r"$\g<0>$", cell) for cell in cells[1:6]]
        if cells[3].endswith("*"):  # what holds is bold, as papers print it
            numbers[2] = rf"$\mathbf{{{cells[3].removesuffix('*')}}}$"
        rows.append([_escaped(cells[0]), *numbers])
    lines = [[_escaped(name) for name in names], *rows]
    body = [" & ".join(line) + r" \\" for line in lines]
    rule = [r"\begin{tabular}{lrrrrr}", r"\toprule", body[0], r"\midrule", *body[1:]]
    return "\n".join([*rule, r"\bottomrule", r"\end{tabular}"])


def _escaped(text: str) -> str:
    return re.sub(r"[\\~^&%$#_{}]", lambda sign: LATEX_SIGNS.get(sign[0], "\\" + sign[0]), text)


def _csv(pairs: Sequence[Compared]) -> str:
    buffer = io.StringIO()
    records = [record for pair in pairs for record in _records(pair)]
    writer = csv.DictWriter(buffer, [*records[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue().rstrip("\n")


def _records(pair: Compared) -> Iterator[dict[str, Any]]:
    for kind, name, result in comparison_rows(pair):
        bounds = [value if math.isfinite(value) else None for value in (result.low, result.high)]
        yield {
            "baseline_name": pair.baseline.name,
            "other_name": pair.other.name,
            "breakdown": kind,
            "of": name,
            "difference": result.value,
            **asdict(result),
            **dict(zip(("low", "high"), bounds, strict=True)),  # JSON knows no infinite number
            "holds": result.holds,
        }


def comparison_record(pairs: Sequence[Compared]) -> dict[str, Any]:
    """Return comparisons as JSON can hold them, figures from 0 to 1."""
    return {
        "baseline": pairs[0].baseline.name,
        "compared": [
            {
                "name": pair.other.name,
                "runs": [len(pair.baseline.runs), len(pair.other.runs)],
                "verdict": pair.verdict,
                "notes": pair.notes,
                "differences": [*_records(pair)],
            }
            for pair in pairs
        ],
    }
