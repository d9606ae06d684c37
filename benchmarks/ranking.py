"""Time, memory and error of stage two, by loss, batch, dimensions and ranks.

Each setting runs in processes of its own, on the same threads whatever the number of ranks. Within it, one dense
product of the batch with itself, every loss and every materialised form take turns, so that a noisy machine is noisy
for all of them.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.materialised import materialised_bytes, materialised_loss
from benchmarks.peak import peak_bytes
from distap.errors import DistapError
from distap.pages.charts import Chart, Series, line_chart, plain
from distap.pages.page import write_page
from distap.ranking.gather import gather
from distap.ranking.loss import Gathered, Loss, build_loss
from distap.ranking.rank import rank_descriptors
from distap.telemetry.terminal import text_table
from distap.world import World, joined_world

NOISE = 0.7  # of an image's own direction against its class's: then all bins are in use
RESULT = "result: "  # what a process prints its figures behind


@dataclass(frozen=True)
class Setting:
    """What one process, or one group of ranks, measures.

    Args:
        losses: by name, with their defaults.
        batch, dimensions, images_a_class: B, C and P.
        ranks, threads: processes, and the threads of all of them together.
        rounds: times that each is done.
        budget: bytes that ranking may use; None chooses by the device.
        materialised: bytes that a materialised form may take; where it would take more, it is left out.
        error_batch: greatest batch that is ranked in float64 as well.
    """

    losses: list[str]
    batch: int
    dimensions: int
    images_a_class: int
    ranks: int
    threads: int
    rounds: int
    budget: int | None
    materialised: int
    error_batch: int


@dataclass(frozen=True)
class Figures:
    """What was measured of one loss in one setting; seconds are medians."""

    loss: str
    batch: int
    dimensions: int
    ranks: int
    seconds: float
    dense_seconds: float  # of one B x B x C product on the same threads
    peak_bytes: float | None  # beside the descriptors, of the rank that took most; None where unknown
    materialised_seconds: float | None
    materialised_peak_bytes: float | None
    error: float | None  # of the gradient in float32 against float64, relative


def measure(
    losses: Sequence[str],
    batches: Sequence[int],
    dimensions: Sequence[int],
    ranks: Sequence[int],
    *,
    images_a_class: int,
    rounds: int,
    threads: int,
    budget: int | None,
    materialised: int,
    error_batch: int,
) -> Iterator[list[Figures]]:
    """Measure every combination, one at a time; the arguments are those of Setting.

    Raises:
        DistapError: a loss is unknown, or a process failed.
    """
    for loss in losses:
        build_loss(loss)
    for size, width, processes in product(batches, dimensions, ranks):
        setting = Setting(
            list(losses), size, width, images_a_class, processes, threads, rounds, budget, materialised, error_batch
        )
        yield _in_processes(setting)


def _in_processes(setting: Setting) -> list[Figures]:
    command = [sys.executable, "-m", "benchmarks.ranking", json.dumps(asdict(setting))]
    if setting.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setting.ranks)]
        command[1:2] = [*launcher, "-m"]
    threads = max(1, setting.threads // setting.ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    results = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not results:
        raise DistapError(f"the measurement of B = {setting.batch}, {setting.ranks} ranks failed; see above")
    return [Figures(**figures) for figures in json.loads(results[0])]


def measure_here(setting: Setting, world: World) -> list[Figures]:
    """What one of the processes does."""
    gathered = synthetic_batch(setting, world)
    candidates: dict[str, Callable[[], object]] = {"dense": _dense_product(gathered)}
    losses = {name: build_loss(name) for name in setting.losses}
    for name, loss in losses.items():
        candidates[name] = partial(rank_descriptors, loss, gathered, memory_bytes=setting.budget)
        if world.size == 1 and materialised_bytes(loss, setting.batch) <= setting.materialised:
            candidates[f"materialised {name}"] = partial(_materialised_gradient, loss, gathered)
    peaks: dict[str, float | None] = {}
    for name, candidate in candidates.items():
        candidate()  # compiles what is compiled
        peak = world.maximum(peak_bytes(candidate, world.device))
        peaks[name] = peak if math.isfinite(peak) else None
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(setting.rounds):
        for name, candidate in candidates.items():
            seconds[name].append(_seconds(candidate, world))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        Figures(
            name,
            setting.batch,
            setting.dimensions,
            setting.ranks,
            medians[name],
            medians["dense"],
            peaks[name],
            medians.get(f"materialised {name}"),
            peaks.get(f"materialised {name}"),
            _error(loss, gathered, setting.budget) if setting.batch <= setting.error_batch else None,
        )
        for name, loss in losses.items()
    ]


def synthetic_batch(setting: Setting, world: World) -> Gathered:
    """Noisy images of random classes, in any order; the same on any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    batch, dimensions = setting.batch, setting.dimensions
    labels = (torch.arange(batch) // setting.images_a_class)[torch.randperm(batch, generator=generator)]
    centres = normalize(torch.randn(int(labels.max()) + 1, dimensions, generator=generator))
    own = normalize(torch.randn(batch, dimensions, generator=generator))
    descriptors = normalize((1 - NOISE) * centres[labels] + NOISE * own)
    mine = slice(world.rank, None, world.size)
    present = torch.ones(len(labels[mine]), dtype=torch.bool, device=world.device)
    return gather(descriptors[mine].to(world.device), labels[mine].to(world.device), present, world, batch)


def _dense_product(gathered: Gathered) -> Callable[[], object]:
    """This rank's rows of one B x B x C product, into memory that is there already."""
    rows, columns = gathered.descriptors[gathered.own], gathered.descriptors.t()
    out = rows.new_zeros(len(rows), columns.shape[1])
    return lambda: torch.mm(rows, columns, out=out)


def _materialised_gradient(loss: Loss, gathered: Gathered) -> Tensor:
    with torch.enable_grad():
        descriptors = gathered.descriptors.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(materialised_loss(loss, descriptors, gathered.labels), descriptors)
    return gradient


def _seconds(candidate: Callable[[], object], world: World) -> float:
    """Of the slowest rank."""
    world.barrier()
    _synchronise(world)
    started = time.perf_counter()
    candidate()
    _synchronise(world)
    return world.maximum(time.perf_counter() - started)


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _error(loss: Loss, gathered: Gathered, budget: int | None) -> float:
    """Of the gradient in float32, without what L2 normalisation takes out."""
    wide = replace(gathered, gallery=normalize(gathered.gallery.double()))
    single = rank_descriptors(loss, gathered, memory_bytes=budget).gradient.double()
    double = rank_descriptors(loss, wide, memory_bytes=budget).gradient
    own = wide.descriptors[gathered.own]
    projected = [gradient - (gradient * own).sum(1, keepdim=True) * own for gradient in (single, double)]
    squares = torch.stack([(projected[0] - projected[1]).square().sum(), projected[1].square().sum()])
    difference, whole = gathered.world.sum(squares).sqrt()
    return float(difference / whole)


def table(figures: Sequence[Figures]) -> Table:
    """The figures for the terminal."""
    title = "stage two: value and gradient of a global batch"
    return text_table(title, CAPTION, HEADINGS, map(_cells, figures))


CAPTION = (
    "x dense: times one B x B x C product on the same threads. MB: peak beside the descriptors. faster: than the "
    "materialised form with autograd, whose peak is its MB. error: of the gradient in float32, relative to float64."
)
HEADINGS = ("loss", "B", "C", "ranks", "ms", "x dense", "MB", "faster", "its MB", "error")


def _cells(row: Figures) -> list[str]:
    faster = "-" if row.materialised_seconds is None else f"{row.materialised_seconds / row.seconds:.1f}x"
    error = "-" if row.error is None else f"{row.error:.0e}"
    return [
        row.loss,
        f"{row.batch:,}",
        str(row.dimensions),
        str(row.ranks),
        f"{1000 * row.seconds:,.0f}",
        f"{row.seconds / row.dense_seconds:.2f}",
        _megabytes(row.peak_bytes),
        faster,
        _megabytes(row.materialised_peak_bytes),
        error,
    ]


def _megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"


def write_results(folder: Path, figures: Sequence[Figures], facts: str) -> Path:
    """Write ranking.json and ranking.html, the table with plots of seconds and memory; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranking.json").write_text(json.dumps([asdict(row) for row in figures], indent=1) + "\n")
    page = folder / "ranking.html"
    sections = {}
    for dimensions, ranks in sorted({(row.dimensions, row.ranks) for row in figures}):
        rows = [row for row in figures if (row.dimensions, row.ranks) == (dimensions, ranks)]
        sections[f"C = {dimensions}, {ranks} rank{'s' * (ranks > 1)}"] = _charts(rows)
    title, note = "Stage two: time and memory by loss", f"{facts}. {CAPTION}"
    cells = [_cells(row) for row in figures]
    write_page(page, "measurements.html", title=title, note=note, sections=sections, heading=HEADINGS, rows=cells)
    return page


def _charts(rows: Sequence[Figures]) -> dict[str, Chart | None]:
    names = list(dict.fromkeys(row.loss for row in rows))
    seconds = {name: [(row.batch, row.seconds) for row in rows if row.loss == name] for name in names}
    seconds["one dense product"] = sorted({row.batch: row.dense_seconds for row in rows}.items())
    megabytes = {
        name: [(row.batch, row.peak_bytes / 1e6) for row in rows if row.loss == name and row.peak_bytes]
        for name in names
    }
    return {
        "Seconds": _log_chart(seconds, "seconds"),
        "Peak memory beside the descriptors, MB": _log_chart(megabytes, "MB"),
    }


def _log_chart(lines: dict[str, list[tuple[int, float]]], y_label: str) -> Chart | None:
    """Lines over two logarithmic axes, where a power law is straight."""
    series = [
        Series(name, [(math.log2(batch), math.log10(value)) for batch, value in points], marked=True)
        for name, points in lines.items()
    ]
    return line_chart(series, y_label, lambda value: plain(10**value), x_label="log2 of the batch's images")


def main() -> None:
    """Measure the setting of the command line and print the figures as JSON."""
    setting = Setting(**json.loads(sys.argv[1]))
    with joined_world() as world:
        torch.set_num_threads(max(1, setting.threads // setting.ranks))
        figures = [asdict(row) for row in measure_here(setting, world)]
        if world.rank == 0:
            print(RESULT + json.dumps(figures))


if __name__ == "__main__":
    main()
