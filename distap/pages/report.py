"""The report page of a run, or of several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from distap.pages.contact_sheets import Confusion, Sheet, confusions, sheet
from distap.pages.markup import definitions, note, table
from distap.pages.page import write_page
from distap.pages.run_curves import RunLines, curves, seconds
from distap.pages.scores import Scores, figures_table, lowest_classes, precision_over_recall


@dataclass(frozen=True)
class Report:
    """What a report page tells, in its order."""

    title: str
    runs: Sequence[RunLines]
    facts: dict[str, list[str]]  # a value a run
    settings: dict[str, list[str]] = field(default_factory=dict)  # recipe keys in which the runs differ
    scores: Sequence[Scores] = ()  # what gained, last
    sheets: Sequence[Sheet] = ()
    confused: Sequence[Confusion] = ()  # by the network of the last scores
    notes: Sequence[str] = ()  # what is missing, and why


def write_report(path: Path, report: Report) -> None:
    """Write the page, whole or not at all.

    Raises:
        UnwritableError: it cannot be written.
    """
    several = len(report.runs) > 1
    title, gain = ("The runs side by side", "difference") if several else ("Figures", "gain")
    sections = [
        _facts(report),
        "".join(note(text) for text in report.notes),
        _settings(report) if several else "",
        figures_table(report.scores, title, gain),
        curves(report.runs),
        seconds(report.runs),
        precision_over_recall(report.scores),
        *(sheet(each) for each in report.sheets),
        confusions(report.confused, report.scores[-1].name if report.scores else ""),
        lowest_classes(report.scores, gain),
    ]
    write_page(path, report.title, "".join(sections))


def _facts(report: Report) -> str:
    if len(report.runs) == 1:
        return definitions({name: values[0] for name, values in report.facts.items()})
    return _columns("", report.facts, report.runs)


def _settings(report: Report) -> str:
    if not report.settings:
        return "<h2>Recipes</h2>\n" + note("The recipes are the same, but for the run's folder.")
    about = note("Only keys whose values differ, as the runs were trained.")
    return f"<h2>Where the recipes differ</h2>\n{about}{_columns('key', report.settings, report.runs)}"


def _columns(heading: str, rows: dict[str, list[str]], runs: Sequence[RunLines]) -> str:
    # Long keys break where they are joined.
    names = {name: escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>") for name in rows}
    cells = [[names[name], *map(escape, values)] for name, values in rows.items()]
    return table([heading, *(run.name for run in runs)], cells).replace("<table>", '<table class="texts">', 1)
