"""`distap train` and `distap report`: train a recipe, and write a page about a run."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import JSON, OVERRIDES, RANKS, RECIPE_ARGUMENT, print_json, ranks_to_start
from distap.processes.stopping import end_when_asked, go_deaf
from distap.telemetry.terminal import figures_table, print_result, set_up_logging

REPORT_FOLDER = "Folder to write report.html and summary.json to."
FOLLOW = "Rewrite the page at this interval while a run trains, and let the browser reload it."
DRY_RUN = "Load data and weights, try a first batch and print the plan, without training."

TAKES_OVER = Annotated[
    bool,
    typer.Option(
        "--take-over", help="Take the run folder over from another training that seems to use it."
    ),
]


def train_rank(
    config: RECIPE_ARGUMENT, overrides: OVERRIDES = None, take_over: TAKES_OVER = False
) -> None:
    """Train on this process's rank: alone, or as one of the ranks that torchrun starts.

    The run goes on from its newest checkpoint, if there is one. On SIGTERM or SIGINT it finishes
    the step or breaks off the evaluation, writes a checkpoint and exits with status 75: start it
    again. Other exit statuses: 0 all steps are done, 2 a mistake that a person must mend, 1 a
    failure.
    """
    end_when_asked()
    _set_take_over(take_over)
    # Imported here, so that --help does not wait for torch.
    from distap.config.reading import load_recipe

    recipe = load_recipe(config, overrides or [])
    from distap.trainer import trained

    with trained(recipe) as status:
        # Only leaving is left, and a signal now would turn a finished training's exit status into
        # another.
        go_deaf()
    sys.exit(status)


def train_command(
    config: RECIPE_ARGUMENT,
    overrides: OVERRIDES = None,
    ranks: RANKS = "1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    take_over: TAKES_OVER = False,
) -> None:
    """Train a recipe with the three-stage step.

    An interrupted run goes on from its newest checkpoint.

    To train on several machines, start `python -m distap.launcher CONFIG` on each, with torchrun's
    options.
    """
    overrides = overrides or []
    count = ranks_to_start(ranks, config, overrides)
    if dry_run:
        check_training(config, overrides, count)
        return
    if count == 1:
        train_rank(config, overrides, take_over)
        return
    from distap.launcher import launch_training

    end_when_asked()
    _set_take_over(take_over)
    raise typer.Exit(launch_training([f"--nproc-per-node={count}"], config, overrides))


def _set_take_over(take_over: bool) -> None:
    if take_over:  # the ranks that are started inherit it
        from distap.checkpoint.lease import TAKE_OVER

        os.environ[TAKE_OVER] = "1"


def check_training(config: Path, overrides: list[str], ranks: int) -> None:
    """Build all parts of a training in this process, and print what `ranks` ranks would do."""
    from distap.config.reading import load_recipe

    set_up_logging(0, as_results=True)
    recipe = load_recipe(config, overrides)
    from distap.training.dry_run import dry_run

    dry_run(recipe, ranks)
    print_result(f"{config}: nothing is wrong")


def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help=REPORT_FOLDER, show_default="the run")] = None,
    follow: Annotated[int | None, typer.Option(metavar="SECONDS", help=FOLLOW, min=1)] = None,
    as_json: JSON = False,
) -> None:
    """Write a page about a run: curves, times, figures, neighbours, hardest queries.

    With --json: `report`, the page; and `summary`, as in summary.json: figures `before` and `after`
    (0 to 1), those of each of several data sets in `sets`, `train_seconds` and
    `outside_network_share`.
    """
    from distap.pages.report import follow_run, report

    if follow is not None:
        follow_run(run, follow, lambda: report(run, output, reload=follow))
    page, summary = report(run, output)
    if as_json:
        print_json({"report": str(page), "summary": summary})
        return
    first = {when: summary[when] for when in ("before", "after") if summary[when]}
    for name, columns in summary.get("sets", {"": first}).items():
        if name:
            print_result(f"\n{name}")
        if columns:
            print_result(figures_table(columns))
    share = summary["outside_network_share"]
    outside = "" if share is None else f", {100 * share:.1f}% of a step outside the network"
    print_result(f"trained in {summary['train_seconds']:.0f} s{outside}", f"report: {page}")
