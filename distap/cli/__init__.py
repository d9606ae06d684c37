"""The `distap` command line; each command is a thin call into the library."""

from typing import Annotated

import typer

from distap.cli.data import data
from distap.cli.descriptors import extract_command, index_command, whiten_command
from distap.cli.evaluation import eval_command
from distap.cli.export import export_command
from distap.cli.options import App, run
from distap.cli.recipes import config_command, init_command, recipes_command
from distap.cli.search import search_command, serve_command
from distap.cli.train import report_command, train_command
from distap.cli.tune import tune_command

app = App()
app.command("init")(init_command)
app.command("recipes")(recipes_command)
app.command("config")(config_command)
app.add_typer(data, name="data")
app.command("train")(train_command)
app.command("tune")(tune_command)
app.command("eval")(eval_command)
app.command("extract")(extract_command)
app.command("export")(export_command)
app.command("whiten")(whiten_command)
app.command("index")(index_command)
app.command("search")(search_command)
app.command("serve")(serve_command)
app.command("report")(report_command)


def _print_version(asked: bool) -> None:
    if asked:
        from distap import __version__

        typer.echo(f"distap {__version__}")
        raise typer.Exit


VERSION_ASKED = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")


@app.callback()
def every_command(version: Annotated[bool, VERSION_ASKED] = False) -> None:
    """Train image-retrieval descriptors by optimising Average Precision over huge batches."""


def main() -> None:
    run(app, "distap")
