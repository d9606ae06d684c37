"""Run one rank of a training: `torchrun -m distap.train CONFIG [key=value ...]`.

In Python, call `distap.train`.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from distap.cli.options import run
from distap.cli.train import train_rank


class _Callable(ModuleType):
    """Make this module callable, because importing it hides the function `distap.train`."""

    def __call__(self, *arguments: Any, **objects: Any) -> Path:
        from distap.library import train

        return train(*arguments, **objects)


sys.modules[__name__].__class__ = _Callable


def main() -> None:
    """Train on this process's rank with the recipe of the command line."""
    application = typer.Typer(add_completion=False)
    application.command()(train_rank)
    run(application, "torchrun -m distap.train")


if __name__ == "__main__":
    main()
