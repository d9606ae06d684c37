"""The hook by which mkdocs puts into reference pages what the code says: `<!-- keys -->` and the like."""

import inspect
import re
from collections.abc import Callable, Iterator

import typer

from distap import errors
from distap.cli import app
from distap.config.keys import recipe_keys
from distap.telemetry.metrics import OF_RANK, OF_TRAINING


def keys() -> Iterator[str]:
    """Tables of a recipe's keys, one for each section of it."""
    section = None
    for key in recipe_keys():
        first = key.path.partition(".")[0]
        top = first if key.values.startswith(("keys", "name,")) or "." in key.path else "Top level"
        if top != section and (section is None or top != "Top level"):
            section = top
            yield from ("", f"## {top}", "", "| key | takes | default | meaning |", "|---|---|---|---|")
        name = f"`{key.path}`" + (f" of {cell(key.of)}" if key.of else "")
        default = f"`{key.default}`" if key.default else ""
        yield f"| {name} | {cell(key.values)} | {default} | {cell(key.meaning)} |"


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|")


def metrics() -> Iterator[str]:
    """A table of the metrics that a rank shows."""
    yield from ("| metric | type | labels | meaning |", "|---|---|---|---|")
    for kind, name, told, *labels in (*OF_RANK.values(), *OF_TRAINING.values()):
        suffix = "_total" if kind.__name__ == "Counter" else ""
        yield f"| `distap_{name}{suffix}` | {kind.__name__.lower()} | {', '.join(labels)} | {cell(told)} |"


def statuses() -> Iterator[str]:
    """The table of exit statuses in the docstring of `distap.errors`."""
    yield from (line for line in (inspect.getdoc(errors) or "").splitlines() if line.startswith("|"))


def commands() -> Iterator[str]:
    """Each command with its help, arguments and options."""
    yield from _commands(typer.main.get_command(app), ("distap",))


def _commands(command, path: tuple[str, ...]) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))
        return
    arguments = " ".join(each.make_metavar(None) for each in command.params if each.param_type_name == "argument")
    yield from ("", f"## {' '.join(path)}", "", f"    {' '.join(path)} [OPTIONS] {arguments}", "", inspect.cleandoc(command.help or ""))
    yield from ("", "| option | default | meaning |", "|---|---|---|")
    for each in command.params:
        record = each.opts[0] if each.param_type_name == "option" else each.make_metavar(None)
        shown = each.show_default if isinstance(each.show_default, str) else each.default
        default = "" if shown in (None, False) or callable(shown) else f"`{shown}`"
        yield f"| `{cell(record)}` | {default} | {cell(getattr(each, 'help', None) or '')} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "keys": keys, "metrics": metrics, "statuses": statuses, "commands": commands
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each mark by what it names."""
    return re.sub(r"<!-- (\w+) -->", lambda mark: "\n".join(PAGES[mark[1]]()), markdown)
