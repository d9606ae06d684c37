"""`distap tune`: search for better settings of a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import OVERRIDES, RANKS, RECIPE_ARGUMENT, ranks_to_start
from distap.errors import DistapError
from distap.processes.stopping import leave_when_asked
from distap.telemetry.terminal import print_result, set_up_logging

TUNING_FOLDER = "Folder to keep the search in. The same command goes on from there."
SPACE_HELP = "YAML file with the values to search by recipe key."
MINUTES_HELP = "Begin trials for this long, minutes; the last one runs to its end."
SHARE_HELP = "Share of the recipe's cost (pixels that the network sees) that a trial takes."


def tune_command(
    config: RECIPE_ARGUMENT,
    overrides: OVERRIDES = None,
    minutes: Annotated[float, typer.Option(help=MINUTES_HELP, min=0.01)] = 20,
    output: Annotated[
        Path | None, typer.Option(help=TUNING_FOLDER, show_default="runs/NAME-tune")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help=SPACE_HELP, show_default="space.yaml there", exists=True)
    ] = None,
    share: Annotated[float, typer.Option(help=SHARE_HELP, min=0.001, max=1)] = 0.1,
    ranks: RANKS = "1",
) -> None:
    """Search for better settings of a recipe by short trainings.

    They are judged on a quarter of its training classes. Writes a recipe with the best values and
    the reason for each, and a page about all trials.
    """
    set_up_logging(0)
    leave_when_asked()
    try:
        from distap.apps.tune import SPACE_FILE, TUNED, TUNING_PAGE, Tuning
    except ModuleNotFoundError as error:
        raise DistapError(
            "package.missing", f"distap tune needs {error.name}: pip install 'distap[tune]'"
        ) from error
    folder = output or Path("runs") / f"{config.stem}-tune"
    count = ranks_to_start(ranks, config, overrides)
    tuning = Tuning(config, overrides or [], folder, space or folder / SPACE_FILE, share, count)
    tuning.search(minutes)
    print_result(
        f"recipe: {folder / TUNED}. Next: distap train {folder / TUNED}",
        f"page: {folder / TUNING_PAGE}",
    )
