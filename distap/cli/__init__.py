"""The `distap` command line; each command is a thin call of the library."""

import typer

from distap.cli.data import data
from distap.cli.descriptors import extract_command, index_command, whiten_command
from distap.cli.evaluation import eval_command
from distap.cli.export import export_command
from distap.cli.k8s import k8s
from distap.cli.options import run
from distap.cli.search import search_command, serve_command
from distap.cli.training import (
    init_command,
    plan_command,
    recipes_command,
    report_command,
    study_command,
    train_command,
)

app = typer.Typer(
    help="Train image-retrieval descriptors by optimising Average Precision over huge batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.command("init")(init_command)
app.command("recipes")(recipes_command)
app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("extract")(extract_command)
app.command("export")(export_command)
app.command("whiten")(whiten_command)
app.command("index")(index_command)
app.command("search")(search_command)
app.command("serve")(serve_command)
app.command("report")(report_command)
app.command("study")(study_command)
app.command("plan")(plan_command)
app.add_typer(k8s, name="k8s")


def main() -> None:
    run(app, "distap")
