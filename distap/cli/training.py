"""The commands `distap train` and `distap report`."""

from pathlib import Path
from typing import Annotated

import typer

from distap.train import CONFIG, OVERRIDES, train


def train_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    ranks: Annotated[int, typer.Option(help="Number of processes on this machine, one a GPU.", min=1)] = 1,
) -> None:
    """Train a recipe with the three-stage step; an interrupted run goes on from its newest checkpoint.

    To train on several machines, start `python -m distap.launcher CONFIG` on each, with torchrun's options.
    """
    if ranks == 1:
        train(config, overrides)
        return
    from distap.launcher import launch_training
    from distap.processes.stopping import end_when_asked

    end_when_asked()
    status = launch_training(["--standalone", f"--nproc-per-node={ranks}"], config, overrides or [])
    raise typer.Exit(status)


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a training run. Several runs are compared.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write report.html and summary.json to; by default the run's, or the parent of all runs."
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            help="Evaluation before the training, a folder that `distap eval --output` wrote; by default the run's."
        ),
    ] = None,
    after: Annotated[
        Path | None, typer.Option(help="Evaluation after the training, a folder like --before; by default the run's.")
    ] = None,
) -> None:
    """Write a page about one run, or several side by side: curves, times, figures, neighbours, hardest queries."""
    from distap.pages.report import report
    from distap.telemetry.terminal import console, figures_table

    page, summary = report(runs, output, before, after)
    of_runs = summary.get("runs", {"": summary})
    columns = {
        f"{name} {when}".strip(): of_run[when]
        for name, of_run in of_runs.items()
        for when in ("before", "after")
        if of_run[when]
    }
    if columns:
        console.print(figures_table(columns))
    for name, of_run in of_runs.items():
        share = of_run["outside_network_share"]
        outside = "" if share is None else f", {100 * share:.1f}% of a step outside the network"
        console.print(f"{name}: trained in {of_run['train_seconds']:.0f} s{outside}".removeprefix(": "), markup=False)
    console.print(f"report: {page}", markup=False)
