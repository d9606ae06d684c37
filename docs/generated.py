"""The hook by which mkdocs puts into pages what code says, `<!-- keys -->`, and studies, `<!--
study NAME -->`.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import typer

from distap import errors
from distap.cli import app
from distap.telemetry.metrics import GLOBAL, OF_RANK

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gain import INIT, JUDGED, difference, mean_of
from benchmarks.study.grid import Grid
from benchmarks.study.results import Results, read_results
from benchmarks.study.results import markdown as table_of
from docs.error_codes import AREAS, made_errors
from docs.recipe_keys import recipe_keys


def keys() -> Iterator[str]:
    """Tables of a recipe's keys, one for each section of it."""
    tables: dict[str, list[str]] = {"Top level": []}
    for key in recipe_keys():
        first = key.path.partition(".")[0]
        is_section = "." in key.path or key.values.startswith(("keys", "name,"))
        name = f"`{key.path}`" + (f" of {cell(key.of)}" if key.of else "")
        default = f"`{key.default}`" if key.default else ""
        row = f"| {name} | {cell(key.values)} | {default} | {cell(key.meaning)} |"
        tables.setdefault(first if is_section else "Top level", []).append(row)
    for title, rows in tables.items():
        yield from (
            "",
            f"## {title}",
            "",
            "| key | takes | default | meaning |",
            "|---|---|---|---|",
            *rows,
        )


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|")


def metrics() -> Iterator[str]:
    """A table of the metrics that a rank shows."""
    yield from ("| metric | type | labels | meaning |", "|---|---|---|---|")
    for kind, name, told, *labels in (*OF_RANK.values(), *GLOBAL.values()):
        suffix = "_total" if kind.__name__ == "Counter" else ""
        yield (
            f"| `distap_{name}{suffix}` | {kind.__name__.lower()} | {', '.join(labels)} |"
            f" {cell(told)} |"
        )


def statuses() -> Iterator[str]:
    """The table of exit statuses in the docstring of `distap.errors`."""
    rows: list[list[str]] = []
    for line in (inspect.getdoc(errors) or "").splitlines():
        cells = (
            [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        )
        if cells and rows and not cells[0]:  # the row before goes on
            rows[-1] = [
                f"{above} {below}".strip() for above, below in zip(rows[-1], cells, strict=True)
            ]
        elif cells:
            rows.append(cells)
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def error_codes() -> Iterator[str]:
    """Tables of all error codes with their messages, one for each area."""
    messages: dict[str, dict[str, None]] = {}
    files: dict[str, dict[str, None]] = {}
    for error in made_errors():
        if error.code:
            messages.setdefault(error.code, {})[plain(error.message)] = None
            files.setdefault(error.code, {})[f"`{error.path}`"] = None
    for area, meaning in AREAS.items():
        codes = sorted(code for code in messages if code.partition(".")[0] == area)
        if codes:
            yield from ("", f"## {area}: {meaning}", "", "| code | messages | raised in |")
            yield "|---|---|---|"
        for code in codes:
            yield f"| `{code}` | {'<br>'.join(messages[code])} | {'<br>'.join(files[code])} |"


def plain(text: str) -> str:
    """Text in a cell of a table in which no sign means anything to Markdown."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", text)


def commands() -> Iterator[str]:
    """Each command with its help, arguments and options."""
    yield from _commands(typer.main.get_command(app), ("distap",))


def _commands(command, path: tuple[str, ...]) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([*path, "[OPTIONS]", *map(_name, arguments)])
    yield from (
        "",
        f"## {' '.join(path)}",
        "",
        f"    {usage}",
        "",
        inspect.cleandoc(command.help or ""),
    )
    yield from ("", "| option | default | meaning |", "|---|---|---|")
    for each in command.params:
        if not getattr(each, "hidden", False):
            shown = each.show_default if isinstance(each.show_default, str) else each.default
            default = "" if shown in (None, False) or callable(shown) else f"`{shown}`"
            yield (
                f"| `{cell(_name(each))}` | {default} | {cell(getattr(each, 'help', None) or '')} |"
            )


def removed() -> Iterator[str]:
    """What CHANGELOG.md lists as gone, with its links as seen from docs/reference."""
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    yield changelog.partition("### Removed\n")[2].partition("\n###")[0].replace("](docs/", "](../")


def study(name: str) -> str:
    """The table of a study in docs/studies, of its trainings there."""
    file = Path(__file__).parent / "studies" / f"{name}.yaml"
    grid = Grid(file, file.parent)
    return table_of(Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl"))))


def factors() -> Iterator[str]:
    """A table of what single changes to `distap init`'s recipe bring on each set, and the updates
    that they allow.
    """
    found: dict[str, dict[str, list]] = {}
    for line in map(
        json.loads, (Path(__file__).parent / "studies/factors.jsonl").read_text().splitlines()
    ):
        found.setdefault(line["contender"], {}).setdefault(line["set"], []).append(line)
    sets = [*found[INIT]]
    yield f"| change | {' | '.join(f'{name} | updates' for name in sets)} |"
    yield "|---|" + "---:|" * 2 * len(sets)
    for change, of_sets in found.items():
        cells = list[str]()
        for lines, others in ((of_sets.get(name), found[INIT][name]) for name in sets):
            told = (
                None
                if lines is None
                else mean_of(lines, JUDGED)
                if change == INIT
                else difference(lines, others)
            )
            sign = "+" if told and told.mean >= 0 and change != INIT else ""
            cells += [
                f"{sign}{told or ''}",
                f"{fmean(line['updates'] for line in lines):.0f}" if lines else "",
            ]
        yield f"| {change} | {' | '.join(cells)} |"


def _name(parameter) -> str:
    if parameter.param_type_name == "option":
        return ", ".join(sorted(parameter.opts))
    name = parameter.metavar or parameter.name.upper()
    return name + ("..." if parameter.nargs != 1 and not name.endswith("...") else "")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "keys": keys,
    "metrics": metrics,
    "statuses": statuses,
    "errors": error_codes,
    "commands": commands,
    "factors": factors,
    "removed": removed,
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each mark by what it names."""
    markdown = re.sub(r"<!-- study (\w+) -->", lambda mark: study(mark[1]), markdown)
    return re.sub(r"<!-- (\w+) -->", lambda mark: "\n".join(PAGES[mark[1]]()), markdown)
