"""Options, arguments and errors of several commands, and the application that takes them."""

import errno
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from distap.data.shards.parallel import in_processes
from distap.errors import FAILED, DistapError, memory_ran_out
from distap.processes.forks import leave
from distap.processes.stopping import go_deaf
from distap.storage.locations import scheme_of
from distap.telemetry.terminal import console, print_error, print_text

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a disk that takes no more


class LackingMemoryError(DistapError):
    """Memory ran out where distap tries no smaller size; another start may find more."""

    status = FAILED


def ranks_to_start(
    asked: str, config: Path | None = None, overrides: Sequence[str] | None = None
) -> int:
    """Return the number of ranks for --ranks.

    `auto` is one for each GPU; without GPUs, or for a recipe with device: cpu, it is 1.
    """
    if asked != "auto":
        if not asked.isdecimal() or int(asked) < 1:
            raise typer.BadParameter(f"--ranks {asked!r}: expected a number, 1 or more, or auto")
        return int(asked)
    if config is not None:
        from distap.config.reading import load_recipe

        if load_recipe(config, overrides or ()).device == "cpu":
            return 1
    import torch

    # In a fork, since the ranks are forks of this process, in which an opened GPU would not work.
    [gpus] = in_processes(call, [torch.cuda.device_count], 1)
    return max(1, gpus)


EACH_GPU = "Number of processes to start on this machine; auto starts one for each GPU."
RANKS = Annotated[str, typer.Option(help=EACH_GPU, metavar="N|auto")]
RECIPE_HELP = "Recipe: a YAML file, or a name of `distap recipes`."
CHANGES = (
    "Changes to the recipe, such as evaluation.sizing='side 1024' or optimizer.learning_rate=1e-4."
)
RECIPE_ARGUMENT = Annotated[Path, typer.Argument(help=RECIPE_HELP, show_default=False)]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=CHANGES, show_default=False)
]

# Options of one panel of --help.
network = partial(typer.Option, rich_help_panel="Network")
refinement = partial(typer.Option, rich_help_panel="Refinement of descriptors")
data_option = partial(typer.Option, rich_help_panel="Data sets")

TRAINED = (
    "Trained network: a run folder, one of its checkpoints, a URL of either, or a recipe,"
    " untrained."
)
CHECKPOINT = network(help=TRAINED, show_default=False)
BEST = Annotated[
    bool, network("--best", help="Use a run folder's best checkpoint, not its newest.")
]
TRUSTED = (
    "Import classes that are not distap's if the trained network's record names some, which runs"
    " their code, and read an architecture from the hub or folder that it names."
)
TRUST = Annotated[bool, network("--trust", help=TRUSTED)]
WHITENING = Annotated[
    Path | None,
    refinement(help="Apply this whitening, a file or folder that `distap whiten` wrote."),
]

SEARCHED = "Shards to search in; the images of each data set are the queries."
GALLERY_SET = Annotated[
    str | None, data_option(help=SEARCHED, show_default="all others of its own images")
]
DRAWS = (
    "Draw a gallery of one image per class this many times, query the others, and average the"
    " figures."
)
GALLERY_DRAWS = Annotated[int, data_option(help=DRAWS, min=0)]
TRUTH = "JSON file that says for each query which images are right; see the guide on evaluation."
TRUTH_FILE = Annotated[
    Path | None, data_option(help=TRUTH, show_default="images of a query's class are right")
]


def run(command: typer.Typer, name: str) -> None:
    """Run a command line called `name`; print a DistapError without a traceback."""
    # At Python's own rate, looking for garbage among modules, which stay, takes 1/8 of a start.
    gc.set_threshold(20_000)
    try:
        command(prog_name=name)
    except DistapError as error:
        problem = error
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        leave(end.code)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if memory_ran_out(error):
            problem = LackingMemoryError(
                "memory.ran_out",
                f"memory ran out: {reason}. Lower the batch or the images' size, data.workers or"
                " data.pixels.memory_bytes, or use a larger machine",
            )
        elif isinstance(error, OSError) and error.errno in FULL:
            problem = DistapError(
                "storage.cannot_write",
                f"{error.filename or 'the output'}: cannot be written: {error.strerror}",
            )
        else:
            raise
    else:
        return
    go_deaf()
    print_error(problem)
    leave(problem.status)


JSON = Annotated[
    bool,
    typer.Option("--json", help="Print results as JSON, and nothing else to the standard output."),
]


class CommonCommand(TyperCommand):
    """A command that refuses URLs in place of paths, and a trained network that does not exist."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Typer would break the help where the lines of the docstring end.
        self.help = re.sub(r"(?<=\S)\n *(?=\S)", " ", self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        remaining = super().parse_args(ctx, args)
        for value in ctx.params.values():
            if isinstance(value, Path) and re.match(r"\w{2,}:/", str(value)):
                slashes = ":///" if str(value).startswith("file:") else "://"  # a path has one
                url = str(value).replace(":/", slashes, 1)
                raise DistapError(
                    "command.url", f"{url}: must be a folder or a file on this machine, not a URL"
                )
        return remaining

    def invoke(self, ctx: Any) -> Any:
        # Several ranks would all print, and rank 0 alone may see the network.
        if "RANK" in os.environ:
            return super().invoke(ctx)
        # Most commands load torch, for seconds.
        if console.is_terminal and "torch" not in sys.modules:
            console.print(f"{ctx.command_path}: starting ...", style="dim")
        trained = ctx.params.get("checkpoint")
        if trained:
            from distap.config.reading import is_recipe

            if not (scheme_of(trained) or is_recipe(trained) or Path(trained).exists()):
                raise DistapError(
                    "checkpoint.none",
                    f"{trained}: no checkpoint there; expected a run or its checkpoint",
                )
        return super().invoke(ctx)


class App(typer.Typer):
    """The command line's application, whose commands take -h."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings,
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"]},
            pretty_exceptions_enable=False,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, cls=CommonCommand, **settings)


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=1))
