"""Run one rank of a training: `torchrun -m distap.train CONFIG [key=value ...]`. In Python, call `distap.train`."""

import typer

from distap.cli.options import run
from distap.cli.train import train_rank


def main() -> None:
    """Train on this process's rank with the recipe of the command line."""
    application = typer.Typer(add_completion=False)
    application.command()(train_rank)
    run(application, "torchrun -m distap.train")


if __name__ == "__main__":
    main()
