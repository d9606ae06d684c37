"""Time, memory and error of stage two, by loss, batch, dimensions and ranks."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typer import Option

from benchmarks import harness
from benchmarks.materialised import materialised_bytes, materialised_loss, released_recall_gradient
from benchmarks.measuring import flops_of, matrix_rate, peaks_of
from distap.ranking.gather import gather
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Loss
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.smooth import RecallAtK
from distap.ranking.rank import rank_descriptors
from distap.registry import REGISTRY
from distap.telemetry.terminal import track
from distap.world import World

OPTIONS: dict[str, dict[str, Any]] = {"recall_at_k": {"preset": "released"}}
NOISE = 0.7  # of an image's own direction against its class's, with which all bins are in use
COLUMNS = (
    "loss={loss}|B={batch:,}|C={dimensions}|ranks={ranks}|ms={ms:,.0f}|x"
    " dense={x_dense:.2f}|GFLOP/s={gflops:,.0f}|of"
    " rate={share:.0%}|MB={mb:,.0f}|faster={faster:.1f}x|its MB={its_mb:,.0f}|error={error:.0e}"
)
CAPTION = (
    "x dense: times one B x B x C product on the same threads. GFLOP/s: in matrix products alone,"
    " over the time of all; of rate: of the fastest product here. MB: peak beside the descriptors."
    " faster: than the materialised form with autograd, whose peak is its MB. error: of the"
    " gradient in float32, relative to float64."
)
OF_TEACHER = ("distil_features", "distil_relations", "compatible")
WRAPPERS = ("matryoshka", "sum", "within", "by_set")  # of losses that are measured alone


class RankingBenchmark(harness.Benchmark):
    """Print time, peak memory and error of every loss, beside one dense product and the
    materialised form.

    By default, all losses at B = 1,024 and 4,096, C = 512, on one rank. Each setting runs in
    processes of its own, on the same threads for any number of ranks.
    """

    name: ClassVar[str] = "ranking"
    loss: Annotated[list[str], Option(help="Loss to measure, by name; repeat for several.")] = []
    batch: Annotated[list[int], Option(help="Images of a global batch, B; repeat for several.")] = [
        1024,
        4096,
    ]
    dimensions: Annotated[
        list[int], Option(help="Dimensions of descriptors, C; repeat for several.")
    ] = [512]
    ranks: Annotated[list[int], Option(help="Ranks on this machine; repeat for several.")] = [1]
    images_a_class: Annotated[int, Option(help="Images of a class, P.", min=2)] = 8
    rounds: harness.Rounds = 3
    threads: harness.Threads = os.cpu_count() or 1  # of all ranks together
    memory_mb: Annotated[
        int | None,
        Option(help="Megabytes that ranking may use beside the descriptors; chosen by default."),
    ] = None
    materialised_mb: Annotated[
        int,
        Option(
            help=(
                "Measure materialised forms that take at most this many megabytes; 0 measures none."
            )
        ),
    ] = 8000
    error_batch: Annotated[int, Option(help="Largest batch that is ranked in float64 as well.")] = (
        4096
    )
    output: Annotated[
        Path | None, Option(help="Folder to write ranking.json and ranking.html to.")
    ] = None

    def report(self) -> harness.Report:
        """Measure every combination of batch, dimensions and ranks, one at a time."""
        losses = self.loss or [name for name in REGISTRY["loss"] if name not in WRAPPERS]
        for loss in losses:
            build_loss(loss, **OPTIONS.get(loss, {}))  # an unknown name is an error at once
        settings = [
            self.model_copy(
                update={"loss": losses, "batch": [size], "dimensions": [width], "ranks": [ranks]}
            )
            for size, width, ranks in product(self.batch, self.dimensions, self.ranks)
        ]
        rows: list[harness.Row] = []
        for setting in track(settings, "settings", len(settings)):
            rows += harness.measure_on_ranks(
                setting, setting.ranks[0], max(1, self.threads // setting.ranks[0])
            )
        if self.output is not None:
            self.json_file = self.output / "ranking.json"
            self.page = self.output / "ranking.html"
        shown = [
            {
                **row,
                "ms": 1000 * row["seconds"],
                "x_dense": row["seconds"] / row["dense_seconds"],
                "mb": harness.over(row["peak_bytes"], 1e6),
                "gflops": row["flops"] / row["seconds"] / 1e9,
                "share": row["flops"] / row["seconds"] / row["matrix_rate"],
                "faster": harness.over(row["materialised_seconds"], row["seconds"]),
                "its_mb": harness.over(row["materialised_peak_bytes"], 1e6),
            }
            for row in rows
        ]
        title = "stage two: value and gradient of a global batch"
        return harness.Report(rows, [harness.table_of(title, CAPTION, shown, COLUMNS)])

    def on_rank(self, world: World) -> list[harness.Row]:
        """Measure one combination: the dense product, every loss and every materialised form take
        turns.
        """
        (batch,) = self.batch
        memory_bytes = None if self.memory_mb is None else self.memory_mb * 10**6
        gathered = self._gathered(world)
        numbers = torch.arange(int(gathered.labels.max()) + 1)
        dimensions = self.dimensions[0]
        classes = torch.column_stack([numbers, numbers % 2])
        losses = {
            name: build_loss(name, **OPTIONS.get(name, {})).sized(classes, dimensions, 0)
            for name in self.loss
        }
        candidates: dict[str, Callable[[], object]] = {"dense": dense_product(gathered)}
        for name, loss in losses.items():
            candidates[name] = partial(rank_descriptors, loss, gathered, "sharded", memory_bytes)
            taken = materialised_bytes(loss, batch, recall_queries=1)
            if world.size == 1 and taken is not None and taken <= self.materialised_mb * 10**6:
                candidates[f"materialised {name}"] = partial(_materialised_gradient, loss, gathered)
        for candidate in candidates.values():
            candidate()  # compiles what is compiled
        peaks = peaks_of(candidates, world)
        rate = matrix_rate(world.device, torch.float32, may_use_tf32=False)
        flops = {name: flops_of(candidates[name]) for name in losses}
        seconds = {
            name: turns.median
            for name, turns in harness.take_turns(candidates, self.rounds, world).items()
        }
        return [
            {
                "loss": name,
                "batch": batch,
                "dimensions": self.dimensions[0],
                "ranks": world.size,
                "seconds": seconds[name],
                "dense_seconds": seconds["dense"],
                "peak_bytes": peaks.get(name),
                "flops": flops[name],  # of this rank
                "matrix_rate": rate,
                "materialised_seconds": seconds.get(f"materialised {name}"),
                "materialised_peak_bytes": peaks.get(f"materialised {name}"),
                "error": (
                    _error(loss, gathered, memory_bytes) if batch <= self.error_batch else None
                ),
            }
            for name, loss in losses.items()
        ]

    def _gathered(self, world: World) -> Gathered:
        """Return noisy descriptors of random classes in any order, the same on any number of
        ranks."""
        generator = torch.Generator().manual_seed(0)
        (batch,) = self.batch
        (dimensions,) = self.dimensions
        labels = (torch.arange(batch) // self.images_a_class)[
            torch.randperm(batch, generator=generator)
        ]
        centres = normalize(torch.randn(int(labels.max()) + 1, dimensions, generator=generator))
        random_descriptors = normalize(torch.randn(batch, dimensions, generator=generator))
        own_rows = slice(world.rank, None, world.size)
        descriptors = normalize((1 - NOISE) * centres[labels] + NOISE * random_descriptors)[
            own_rows
        ].to(world.device)
        # Two super-classes, each of half the batch, for losses of graded relevance.
        levels = torch.column_stack([labels, labels % 2])[own_rows].to(world.device)
        is_image = torch.ones(len(levels), dtype=torch.bool)
        gathered = gather(descriptors, levels, is_image, world, batch)
        # The descriptors of other images stand for a teacher's; other losses do not read them.
        return replace(gathered, extra={"teacher": gathered.descriptors.roll(1, dims=0)})


def dense_product(gathered: Gathered) -> Callable[[], object]:
    """Return an action: this rank's rows of one B x B x C product, into memory that is there
    already.
    """
    rows = gathered.descriptors[gathered.own]
    columns = gathered.descriptors.t()
    return partial(torch.mm, rows, columns, out=rows.new_zeros(len(rows), columns.shape[1]))


def _materialised_gradient(loss: Loss, gathered: Gathered) -> Tensor:
    with torch.enable_grad():
        if isinstance(loss, RecallAtK):
            return released_recall_gradient(loss, gathered.descriptors, gathered.labels)
        descriptors = gathered.descriptors.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(
            materialised_loss(loss, descriptors, gathered.labels), descriptors
        )
    return gradient


def _error(loss: Loss, gathered: Gathered, memory_bytes: int | None) -> float:
    """Relative error of the gradient in float32, without the part that L2 normalisation takes
    out."""
    wide = replace(gathered, gallery=normalize(gathered.gallery.double()))
    single = rank_descriptors(loss, gathered, "sharded", memory_bytes).gradient.double()
    double = rank_descriptors(loss, wide, "sharded", memory_bytes).gradient
    own_descriptors = wide.descriptors[gathered.own]
    projected = [
        gradient - (gradient * own_descriptors).sum(1, keepdim=True) * own_descriptors
        for gradient in (single, double)
    ]
    squares = torch.stack(
        [(projected[0] - projected[1]).square().sum(), projected[1].square().sum()]
    )
    difference, whole = gathered.world.sum(squares).sqrt()
    return float(difference / whole)
