"""`distap tune`: search for better settings of a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import OVERRIDES, RANKS, RECIPE_ARGUMENT, ranks_to_start
from distap.errors import DistapError
from distap.processes.stopping import leave_when_asked
from distap.telemetry.terminal import print_result, set_up_logging

TUNING_FOLDER = "Folder to keep the search in. The same command goes on from there."
SPACE_HELP = "YAML file with the values to search by recipe key; without one, space.yaml of the folder."
MINUTES_HELP = "Begin trials for this long, minutes; the last one runs to its end."
SHARE_HELP = "Share of the recipe's cost (pixels that the network sees) that a trial takes."


def tune_command(
    config: RECIPE_ARGUMENT,
    overrides: OVERRIDES = None,
    minutes: Annotated[float, typer.Option(help=MINUTES_HELP, min=0.01)] = 20,
    output: Annotated[Path | None, typer.Option(help=TUNING_FOLDER, show_default="runs/NAME-tune")] = None,
    space: Annotated[Path | None, typer.Option(help=SPACE_HELP, show_default=False)] = None,
    share: Annotated[float, typer.Option(help=SHARE_HELP, min=0.001, max=1)] = 0.1,
    figure: Annotated[str, typer.Option(help="Figure of the held-out classes to make large.")] = "mAP",
    ranks: RANKS = "1",
) -> None:
    """Search for better settings of a recipe: short trainings, judged on a quarter of its training classes.

    Writes a recipe with the best values and the reason for each, and a page about all trials.
    """
    set_up_logging(0)
    try:
        from distap.apps.tune import TUNED, TUNING_PAGE, Tuning
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise DistapError("distap tune needs Optuna: pip install 'distap[tune]'") from error
    folder = output or Path("runs") / f"{config.stem}-tune"
    tuning = Tuning(config, overrides or [], folder, space, share, ranks_to_start(ranks), figure)
    leave_when_asked()
    tuning.search(minutes)
    print_result(f"recipe: {folder / TUNED}. Next: distap train {folder / TUNED}", f"page: {folder / TUNING_PAGE}")
