"""Options shared by several commands: the recipe, the ranks, the network and its whitening."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from distap.errors import DistapError
from distap.processes.forks import in_fork
from distap.processes.stopping import go_deaf

AUTO = 0  # ranks: one for each GPU


def parse_ranks(text: str | int) -> int:
    """Parse --ranks: a number, or AUTO for `auto`."""
    if text in ("auto", AUTO):
        return AUTO
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r}: expected a number, 1 or more, or auto")
    return int(text)


def ranks_to_start(asked: int, device: str = "auto") -> int:
    """Return the number of ranks to start; AUTO is one for each GPU, or one without GPUs."""
    if asked != AUTO or device == "cpu":
        return asked or 1
    import torch

    return max(1, in_fork(torch.cuda.device_count))  # the ranks are forks, in which an opened GPU would not work


EACH_GPU = "Number of processes to start on this machine; auto starts one for each GPU."
RANKS = Annotated[int, typer.Option(help=EACH_GPU, parser=parse_ranks, metavar="N|auto")]
RECIPE_HELP = "Recipe: a YAML file, or a name of `distap recipes`."
CHANGES = "Changes to the recipe, such as evaluation.sizing='side 1024' or optimizer.learning_rate=1e-4."
RECIPE_ARGUMENT = Annotated[Path, typer.Argument(help=RECIPE_HELP, show_default=False)]
OVERRIDES = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help=CHANGES, show_default=False),
]

# Options of one panel of --help.
network = partial(typer.Option, rich_help_panel="Network")
refinement = partial(typer.Option, rich_help_panel="Refinement of descriptors")
output = partial(typer.Option, rich_help_panel="Output")

TRAINED = "run folder, one of its checkpoints, or a URL of either"
CHECKPOINT = network(help=f"Trained network: a {TRAINED}.", show_default=False)
BEST = Annotated[bool, network("--best", help="Use a run folder's best checkpoint, not its newest.")]
WHITENING = Annotated[
    Path | None, refinement(help="Apply this whitening, a file or folder that `distap whiten` wrote.")
]


def run(command: typer.Typer, name: str) -> None:
    """Run a command line called `name`; print a DistapError without a traceback, since the user can mend it."""
    try:
        command(prog_name=name)
    except DistapError as error:
        go_deaf()
        from distap.telemetry.terminal import print_error

        print_error(error)
        sys.exit(error.status)
