"""The `distap` command line; each command is a thin call into the library."""

from typing import Annotated

import typer

from distap.cli.compare import compare_command
from distap.cli.data import data
from distap.cli.descriptors import extract_command, whiten_command
from distap.cli.evaluation import eval_command
from distap.cli.export import export_command
from distap.cli.index import index_command
from distap.cli.options import App, run
from distap.cli.recipes import config_command, init_command, recipes_command
from distap.cli.runs import runs_command
from distap.cli.search import neighbours_command, search_command, serve_command
from distap.cli.train import report_command, train_command
from distap.cli.tune import tune_command

app = App()
for command in (
    init_command,
    recipes_command,
    config_command,
    train_command,
    tune_command,
    eval_command,
    compare_command,
    extract_command,
    export_command,
    whiten_command,
    index_command,
    search_command,
    neighbours_command,
    serve_command,
    report_command,
    runs_command,
):
    app.command(command.__name__.removesuffix("_command"))(command)
app.add_typer(data, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        from distap import __version__

        typer.echo(f"distap {__version__}")
        raise typer.Exit


VERSION_ASKED = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
)


@app.callback()
def every_command(version: Annotated[bool, VERSION_ASKED] = False) -> None:
    """Train image-retrieval descriptors by optimising Average Precision over huge batches."""


def main() -> None:
    run(app, "distap")
