"""Time and memory of a loss with a proxy for each class, by classes and ranks."""

import math
import time
from dataclasses import replace
from itertools import product
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
from torch.nn.functional import normalize
from torch.optim import AdamW
from typer import Option

from benchmarks import harness
from benchmarks.measuring import peak_bytes
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Loss
from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank_descriptors
from distap.telemetry.terminal import track
from distap.world import World

FIRST_CLASSES = 1000
COLUMNS = (
    "classes={classes:,}|C={dimensions}|ranks={ranks}|proxies={held}|first s={first_seconds:.1f}|"
    "rank ms={rank_ms:,.0f}|AdamW ms={update_ms:,.0f}|proxies MB={proxies_mb:,.0f}|"
    "rank MB={rank_mb:,.0f}|all MB={all_mb:,.0f}"
)
CAPTION = (
    "Of one rank, on one thread. first: drawing of its proxies. proxies: their bytes on a rank."
    " rank MB: peak of stage two above them, which has their gradient in it. all: peak of the"
    " process above its start, with proxies, gradient and both moments. Ranks with * communicate"
    " nothing: torch's fake process group gives the buffers of one of them."
)


class ClassesBenchmark(harness.Benchmark):
    """Print time and memory of stage two and of the optimiser, by the number of classes and ranks.

    By default, arc_face of 400,000 classes, B = 256, C = 128: on one and two ranks, with the
    proxies whole on every rank and shared out, and as one of 4, 8 and 64 ranks that share them out.
    Each row is measured in processes of its own. Linux only.
    """

    name: ClassVar[str] = "classes"
    loss: Annotated[str, Option(help="Loss to measure, by name.")] = "arc_face"
    classes: Annotated[list[int], Option(help="Classes, K; repeat for several.")] = [400_000]
    dimensions: Annotated[int, Option(help="Dimensions of descriptors, C.")] = 128
    batch: Annotated[int, Option(help="Images of a global batch, B.")] = 256
    ranks: Annotated[
        list[int], Option(help="Ranks on this machine; repeat for several; 0 measures none.")
    ] = [1, 2]
    fake: Annotated[
        list[int],
        Option(help="Ranks of which one is measured, without the others; 0 measures none."),
    ] = [4, 8, 64]
    sampled: Annotated[
        float | None, Option(help="Share of the other classes that a step scores.")
    ] = None
    rounds: harness.Rounds = 3
    is_sharded: Annotated[bool, Option(hidden=True)] = False
    size: Annotated[int, Option(hidden=True)] = 0

    def report(self) -> harness.Report:
        settings = []
        for count, size in product(self.classes, [*self.ranks, *self.fake]):
            for is_sharded in (False, True):
                if size > 1 if is_sharded else size in self.ranks and size:
                    changes = {"classes": [count], "size": size, "is_sharded": is_sharded}
                    settings.append(self.model_copy(update=changes))
        rows = [
            harness.measure_on_ranks(setting, setting.size if setting.size in self.ranks else 1, 1)
            for setting in track(settings, "settings", len(settings))
        ]
        title = f"{self.loss} of a batch of {self.batch:,}"
        return harness.Report(rows, [harness.table_of(title, CAPTION, rows, COLUMNS)])

    def on_rank(self, world: World) -> harness.Row:
        if world.size == self.size:
            return self._measured(world, str(world.size))
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.size)
        return self._measured(replace(world, size=self.size), f"{self.size}*")

    def _measured(self, world: World, ranks: str) -> harness.Row:
        (classes,) = self.classes
        figures: harness.Row = {}
        self._train(world, FIRST_CLASSES)  # which loads what torch loads once
        all_bytes = peak_bytes(lambda: figures.update(self._train(world, classes)), world.device)
        loss = self._loss(world, classes)
        gathered = self._gathered(world, classes)
        rank_bytes = peak_bytes(lambda: rank_descriptors(loss, gathered), world.device)
        rows = math.ceil(classes / world.size) if self.is_sharded else classes
        return figures | {
            "classes": classes,
            "dimensions": self.dimensions,
            "ranks": ranks,
            "held": "sharded" if self.is_sharded else "whole",
            "proxies_mb": 4 * rows * self.dimensions / 1e6,
            "rank_mb": rank_bytes / 1e6,
            "all_mb": all_bytes / 1e6,
        }

    def _loss(self, world: World, classes: int) -> Loss:
        options = {} if self.sampled is None else {"sampled_negatives": self.sampled}
        loss = build_loss(self.loss, **options).sized(classes, self.dimensions, 0)
        if self.is_sharded:
            loss.shard_classes(world)
        assert loss.parameters  # which are drawn here
        return loss

    def _train(self, world: World, classes: int) -> dict[str, float]:
        """Train the proxies; return the seconds to draw them and the milliseconds of a step."""
        gathered = self._gathered(world, classes)
        started = time.perf_counter()
        loss = self._loss(world, classes)
        first_seconds = time.perf_counter() - started
        (proxies,) = loss.parameters
        optimizer = AdamW([proxies], lr=1e-3)
        milliseconds = []
        for _ in range(1 + self.rounds):
            started = time.perf_counter()
            (proxies.grad,) = rank_descriptors(loss, gathered).by_parameters
            ranked = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            updated = time.perf_counter()
            milliseconds.append((1e3 * (ranked - started), 1e3 * (updated - ranked)))
        rank_ms, update_ms = torch.tensor(milliseconds[1:]).median(0).values.tolist()
        return {"first_seconds": first_seconds, "rank_ms": rank_ms, "update_ms": update_ms}

    def _gathered(self, world: World, classes: int) -> Gathered:
        """Return a random batch, of which each rank has the rows of its slots."""
        generator = torch.Generator().manual_seed(0)
        descriptors = normalize(torch.randn(self.batch, self.dimensions, generator=generator))
        labels = torch.randint(0, classes, (self.batch, 1), generator=generator)
        slots = torch.arange(self.batch)
        return Gathered(
            gallery=descriptors.to(world.device),
            gallery_levels=labels.to(world.device),
            samples=slots,
            own=slots[world.rank :: world.size],
            taking_part=torch.ones(self.batch, dtype=torch.bool),
            world=world,
        )
