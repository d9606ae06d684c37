"""Common parts of all commands: -h, -q and -v, refusal of URLs where a path is due, and results as JSON."""

import inspect
import json
import logging
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from distap.errors import DistapError
from distap.telemetry.logs import origin

QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and results only.")]
VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="Show debug messages too.")]
HIDDEN: dict[str, Any] = {  # each command takes them, and `distap --help` shows them
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", hidden=True)],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", hidden=True)],
}
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead, and nothing else to the standard output.")]


class CommonCommand(TyperCommand):
    """A command that refuses URLs in place of folders and files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        for value in ctx.params.values():
            if isinstance(value, Path) and re.match(r"\w{2,}:/", str(value)):
                url = str(value).replace(":/", "://", 1)
                raise DistapError(f"{url}: must be a folder or a file on this machine, not a URL")
        return left


class App(typer.Typer):
    """Commands that take -h, -q and -v."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"]}
        super().__init__(**settings, no_args_is_help=True, context_settings=context, pretty_exceptions_enable=False)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        register = super().command(name, cls=CommonCommand, **settings)

        def registered(function: Callable[..., None]) -> Callable[..., None]:
            register(_with_loudness(function))
            return function

        return registered


def set_loudness(quiet: bool, verbose: bool) -> None:
    """Set what is said on the standard error; without -q and -v, leave it as it is."""
    if quiet or verbose:
        origin.level = logging.DEBUG if verbose else logging.WARNING


def print_json(value: Any) -> None:
    """Print a value to the standard output as JSON."""
    typer.echo(json.dumps(value, indent=1))


def _with_loudness(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def called(*arguments: Any, quiet: bool = False, verbose: bool = False, **options: Any) -> None:
        set_loudness(quiet, verbose)
        function(*arguments, **options)

    signature = inspect.signature(function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=False, annotation=each) for name, each in HIDDEN.items()]
    # Typer reads the signature of a command, and would break its help where the lines of the docstring end.
    called.__doc__ = re.sub(r"(?<=\S)\n +(?=\S)", " ", function.__doc__ or "")
    called.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])  # type: ignore[attr-defined]
    return called
