"""Where the time of a training's step goes: a recipe's own loader, images, network, ranking, update
and report.
"""

import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar

from typer import Option

from benchmarks import harness
from distap.cli.options import OVERRIDES, RECIPE_ARGUMENT
from distap.config.reading import load_recipe
from distap.telemetry.terminal import track
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

CAPTION = (
    "Percent of a step's time on rank 0. passes: of the network, forward and backward. wait: for"
    " the loader. around: describe and replay without the passes. other: the report, and what no"
    " stage counts."
)
SHOWN = "B={batch:,}|in={size}|s={step:.2f}|images/s={rate:.1f}|"
SHOWN += "passes={passes:.1%}|outside={outside:.2%}|"
SHOWN += "wait={data_wait:.2%}|around={around:.2%}|"
SHOWN += "gather={gather:.2%}|rank={rank:.2%}|reduce={reduce:.2%}|"
SHOWN += "optimizer={optimizer:.2%}|other={other:.2%}"


class RecipeBenchmark(harness.Benchmark):
    """Print where the time of a recipe's steps goes: loader, network, ranking, update, report.

    The recipe trains as it is, on its own images, but for evaluations and checkpoints; only batch
    and micro-batch change. The first step of each training is not counted.
    """

    name: ClassVar[str] = "recipe"
    config: RECIPE_ARGUMENT
    overrides: OVERRIDES = None
    batch: Annotated[
        list[int],
        Option(help="Images of a global batch, at random; repeat.", show_default="the recipe's"),
    ] = []
    micro_batch: Annotated[
        list[int],
        Option(help="Images of a micro-batch; repeat for several.", show_default="the recipe's"),
    ] = []
    steps: Annotated[int, Option(help="Steps to measure; the mean counts.", min=1)] = 3
    ranks: Annotated[int, Option(help="Ranks on this machine.", min=1)] = 1
    threads: harness.Threads = 1  # of each rank

    def report(self) -> harness.Report:
        load_recipe(self.config, self._changes())  # tells mistakes once, not on every rank
        settings = [
            self.model_copy(
                update={"batch": [batch] if batch else [], "micro_batch": [size] if size else []}
            )
            for batch, size in product(self.batch or [0], self.micro_batch or [0])
        ]
        rows = [
            harness.measure_on_ranks(setting, self.ranks, self.threads)
            for setting in track(settings, "trainings", len(settings))
        ]
        return harness.Report(
            rows, [harness.table_of(f"a step of {self.config}", CAPTION, rows, SHOWN)]
        )

    def on_rank(self, world: World) -> harness.Row:
        with tempfile.TemporaryDirectory(prefix="distap-bench-") as temporary_folder:
            folder = Path(world.gather_values(temporary_folder)[0])
            recipe = load_recipe(self.config, [*self._changes(), f"run={folder / 'run'}"])
            Trainer(prepare(recipe, world), world).train()
            lines = [
                json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()
            ]
            world.barrier()  # before rank 0 removes its folder
        taken = [line["seconds"] for line in lines if "loss" in line][1:]
        mean = {
            name: fmean(step_seconds.get(name, 0.0) for step_seconds in taken) for name in taken[0]
        }
        mean["around"] = mean.pop("describe") + mean.pop("replay") - mean["network"]
        shares = {name: spent / mean["step"] for name, spent in mean.items()}
        row = {
            "batch": recipe.sampling.size,
            "size": recipe.replay.size,
            "rate": recipe.sampling.size / mean["step"],
        }
        return (
            row
            | shares
            | {
                "step": mean["step"],
                "passes": shares["network"],
                "outside": 1 - shares["network"],
            }
        )

    def _changes(self) -> list[str]:
        changes = [
            *(self.overrides or []),
            f"steps={1 + self.steps}",
            "evaluation.every=0",
            "checkpoint.every=1000000",
        ]
        changes += [f"sampling={{name: random, batch_size: {batch}}}" for batch in self.batch]
        return changes + [f"replay.size={size}" for size in self.micro_batch]
