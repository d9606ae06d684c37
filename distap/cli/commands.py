"""Parts that all commands share: -h, refusal of URLs in place of local paths, results as JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from distap.errors import DistapError

JSON = Annotated[bool, typer.Option("--json", help="Print results as JSON, and nothing else to the standard output.")]


class CommonCommand(TyperCommand):
    """A command that refuses URLs in place of folders and files."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Typer would break the help where the lines of the docstring end.
        self.help = re.sub(r"(?<=\S)\n *(?=\S)", " ", self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        for value in ctx.params.values():
            if isinstance(value, Path) and re.match(r"\w{2,}:/", str(value)):
                url = str(value).replace(":/", "://", 1)
                raise DistapError(f"{url}: must be a folder or a file on this machine, not a URL")
        return left


class App(typer.Typer):
    """The command line's application, whose commands take -h."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"]}
        super().__init__(**settings, no_args_is_help=True, context_settings=context, pretty_exceptions_enable=False)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, cls=CommonCommand, **settings)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))
