"""Run one rank of a training: `torchrun -m distap.train CONFIG [key=value ...]`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from distap.errors import FAILED, FINISHED, DistapError
from distap.processes.exit_statuses import record_outcome
from distap.processes.startup import Startup
from distap.processes.stopping import end_when_asked, go_deaf
from distap.telemetry.loggers.loggers import end_if_hanging

CONFIG = Annotated[Path, typer.Argument(help="Recipe of the training, a YAML file.", show_default=False)]
OVERRIDES = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, such as optimizer.learning_rate=1e-4.", show_default=False),
]


def train(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train on this process's rank: alone, or as one of the ranks that torchrun starts.

    The run goes on from its newest checkpoint, if there is one. On SIGTERM or SIGINT it finishes the step or breaks
    off the evaluation, writes a checkpoint and exits with status 75: start it again. Other exit statuses: 0 all steps
    are done, 2 a mistake that a person must mend, 1 a failure.
    """
    end_when_asked()
    startup = Startup()
    # Imported here, so that --help does not wait for torch.
    from distap.config.reading import load_recipe
    from distap.telemetry.endpoint import Endpoint
    from distap.telemetry.terminal import set_up_early_logging, set_up_run_logging
    from distap.trainer import Trainer
    from distap.world import joined_world

    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    set_up_early_logging(overrides or [], rank)
    recipe = load_recipe(config, overrides or [])
    set_up_run_logging(recipe.logs.format, recipe.run_id, rank)
    startup.reached("imports")
    with (
        Endpoint(rank).served(recipe.metrics.port_of(local_rank), recipe.metrics.address) as endpoint,
        joined_world(recipe.timeout_seconds) as world,
    ):
        startup.reached("joining")
        status = Trainer(recipe, world, endpoint, startup).train()
        go_deaf()
    sys.exit(status)


def run(command: typer.Typer, name: str) -> None:
    """Run a command line called `name`; a DistapError is printed without a traceback, since it is for a person."""
    status, problem = FAILED, None
    try:
        command(prog_name=name)
        status = FINISHED
    except DistapError as error:
        go_deaf()
        from distap.telemetry.terminal import print_error

        print_error(error)
        status, problem = error.status, error
        sys.exit(status)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else FINISHED if leaving.code is None else FAILED
        raise
    finally:
        record_outcome(status, problem)
        end_if_hanging(status)


def main() -> None:
    """Run this process's rank with the recipe of the command line."""
    application = typer.Typer(add_completion=False)
    application.command()(train)
    run(application, "torchrun -m distap.train")


if __name__ == "__main__":
    main()
