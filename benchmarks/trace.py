"""Count the files and lines of distap that one step of a real training runs: how much a reader has
to read.
"""

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar

from typer import Option

import distap
from benchmarks.harness import Benchmark, FiguresTable, Report
from benchmarks.photos import jpeg, packed, photo
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

PACKAGE = f"{distap.__path__[0]}{os.sep}"
TRACED = 3  # steps that are done when the trace begins: what is built once does not count
CLASSES = 4
IMAGES_A_CLASS = 8
SIDE = 48


def traced_step(loss: str = "ap_q") -> dict[str, set[int]]:
    """Train for some steps on the CPU and return the lines of distap that one of them ran, by file.

    The step is all that `Trainer.train` does from the end of one step to the end of the next: the
    report of the step, the loader's next share, and the three stages. One rank describes 32 images
    in 4 micro-batches and replays them. What loader workers run, which are other processes, is not
    counted. File names are relative to the package.

    Args:
        loss: name of a loss, with its defaults.
    """
    lines: dict[str, set[int]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(prepare(_recipe(Path(folder), loss), World()), World())

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            file = frame.f_code.co_filename
            if not file.startswith(PACKAGE):
                return None
            if event == "line" and trainer.done == TRACED:
                lines[file.removeprefix(PACKAGE)].add(frame.f_lineno)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            trainer.train()
        finally:
            sys.settrace(before)
    return dict(lines)


def _recipe(folder: Path, loss: str) -> Recipe:
    files = [
        jpeg(photo(SIDE, SIDE, number), quality=90) for number in range(CLASSES * IMAGES_A_CLASS)
    ]
    shards = packed(folder, files, "jpg", IMAGES_A_CLASS)
    settings: dict[str, Any] = {
        "run": folder / "run",
        "steps": TRACED + 2,
        "loss": loss,
        "data": {"train": str(shards), "image_size": SIDE, "workers": 1},
        "sampling": {"name": "random", "batch_size": CLASSES * IMAGES_A_CLASS},
        "model": {"backbone": "resnet10t", "weights": "random"},
        "replay": {"size": 8},
        "device": "cpu",
    }
    return load_recipe(settings, where="the traced training")


class TraceBenchmark(Benchmark):
    """Print how many files and lines of distap one step of a small training runs, on one rank with
    its loader.
    """

    name: ClassVar[str] = "trace"
    loss: Annotated[str, Option(help="Loss to rank with, by name.")] = "ap_q"

    def report(self) -> Report:
        lines = {file: len(line_numbers) for file, line_numbers in traced_step(self.loss).items()}
        rows = [[file, str(lines[file])] for file in sorted(lines, key=lambda file: -lines[file])]
        rows.append([f"{len(lines)} files", str(sum(lines.values()))])
        return Report(
            lines,
            [FiguresTable(f"lines that a step with {self.loss} runs", "", ("file", "lines"), rows)],
        )
