"""What `python -m benchmarks step` measures: its settings, figures, and their tables."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks.collectives import Collective
from distap.engine.settings import PrecisionName
from distap.errors import DistapError
from distap.telemetry.terminal import text_table


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        backbone: any timm network.
        weights: `random`, `timm`, the name of a package that carries them, or a file.
        image_size: width and height, pixels.
        batch: B.
        micro_batch: images of a micro-batch, of both passes.
        ranks, threads: processes on this machine, and CPU threads of each.
        rounds: turns that each contender has.
        precision: what the network computes in.
        memory_batches: further batches whose peak memory is measured.
        images_a_class: P.
    """

    backbone: str = "tf_efficientnet_lite0"
    weights: str = "random"
    image_size: int = 96
    batch: int = 128
    micro_batch: int = 16
    ranks: int = 2
    threads: int = 1
    rounds: int = 9
    precision: PrecisionName = "float32"
    memory_batches: tuple[int, ...] = ()
    images_a_class: int = 8

    def __post_init__(self) -> None:
        for batch in (self.batch, *self.memory_batches):
            if batch % self.ranks or batch % self.images_a_class or batch < 2 * self.images_a_class:
                raise DistapError(
                    f"a batch of {batch} images cannot be compared; expected a multiple of the ranks ({self.ranks}) "
                    f"and of the images of a class ({self.images_a_class}), and two classes at least"
                )


@dataclass(frozen=True)
class Figures:
    """What was measured of one contender; times in seconds.

    Args:
        contender: its name.
        seconds: of the slowest rank, by round.
        processor: seconds of all ranks' processors, by round.
        peak_bytes: beside network, optimiser and pixels, of the rank that took most; None where unknown.
        flops: floating-point operations of all ranks, by the passes that were done.
        collectives: of a step, of one rank.
        error: of the parameters' gradient, relative; None of a floor, which has no loss.
        stages: seconds of rank 0 by stage, the mean of the rounds; empty for all but distap.
        left_out: images of all ranks that were not replayed, since their gradient is zero.
    """

    contender: str
    seconds: list[float]
    processor: list[float]
    peak_bytes: float | None
    flops: float
    collectives: list[Collective]
    error: float | None
    stages: dict[str, float]
    left_out: int

    def ratio(self, floor: "Figures") -> float:
        """Times the floor's wall time: the median over rounds."""
        return statistics.median(own / bare for own, bare in zip(self.seconds, floor.seconds, strict=True))

    def processor_ratio(self, floor: "Figures") -> float:
        """Times the floor's processor time: the median over rounds."""
        return statistics.median(own / bare for own, bare in zip(self.processor, floor.processor, strict=True))


@dataclass(frozen=True)
class Results:
    """All that was measured.

    Args:
        setting: what.
        machine: where, with which versions, and when.
        matrix_rate: floating-point operations a second that all ranks reach at once in products of matrices.
        figures: of each contender.
        memory: contender -> batch -> bytes of the peak.
        exact: the contender whose gradient is taken for exact.
        pixels, descriptors: bytes that a rank holds of an image of the global batch.
        omitted: contender -> why it was left out.
    """

    setting: Setting
    machine: dict[str, str]
    matrix_rate: float
    figures: list[Figures]
    memory: dict[str, dict[int, float]]
    exact: str
    pixels: float
    descriptors: float
    omitted: dict[str, str] = field(default_factory=dict)


def as_json(results: Results) -> str:
    """All figures, round by round."""
    return json.dumps(asdict(results), indent=1)


def results_from(parsed: dict[str, Any]) -> Results:
    """Results from their JSON."""
    setting = Setting(**parsed["setting"] | {"memory_batches": tuple(parsed["setting"]["memory_batches"])})
    figures = [
        Figures(**row | {"collectives": [Collective(**call) for call in row["collectives"]]})
        for row in parsed["figures"]
    ]
    memory = {name: {int(b): peak for b, peak in peaks.items()} for name, peaks in parsed["memory"].items()}
    return Results(**parsed | {"setting": setting, "figures": figures, "memory": memory})


def table(results: Results) -> Group:
    """The figures for the terminal."""
    setting, figures = results.setting, results.figures
    title = (
        f"a step of {setting.backbone}, {setting.image_size} px, B = {setting.batch}, micro-batches of "
        f"{setting.micro_batch}, {setting.ranks} ranks, {setting.precision}"
    )
    floors = {row.contender: row for row in figures if row.contender.startswith("floor")}
    speed = text_table(title, SPEED, SPEED_HEADINGS, map(partial(_speed_cells, setting, *floors.values()), figures))
    demands = text_table("what it takes", DEMANDS, DEMAND_HEADINGS, map(partial(_demand_cells, results), figures))
    parts: list[Table | str] = [speed, demands]
    parts += [f"{name} is left out: {why}" for name, why in results.omitted.items()]
    parts += [
        f"{row.contender} did not replay {row.left_out} images, whose gradient is zero"
        for row in figures
        if row.left_out
    ]
    errors = [f"{row.contender} {row.error:.0e}" for row in figures if row.error is not None]
    parts.append(f"error of the parameters' gradient, relative to {results.exact}: " + ", ".join(errors))
    for row in figures:
        if row.stages:
            stages = ", ".join(f"{stage} {1000 * spent:.0f}" for stage, spent in row.stages.items())
            parts.append(f"{row.contender}, ms of rank 0: {stages}")
    if setting.memory_batches:
        parts.append(_memory_table(results))
    return Group(*parts)


SPEED = (
    "s: median and least of the rounds, of the slowest rank. x: times the floor's wall time in the same round, the "
    "median; cpu: the same of processor time. f and b: a forward and a backward pass over all images."
)
SPEED_HEADINGS = ("contender", "s", "least", "images/s", "x 2f+1b", "cpu", "x 1f+1b", "cpu")
DEMANDS = (
    "MB: peak of a rank beside network, optimiser and pixels. of rate: of what products of matrices reach here. "
    "reduces, others: all-reduces and other collectives of a rank, and the MB that it hands to them."
)
DEMAND_HEADINGS = ("contender", "MB", "GFLOP/s", "of rate", "reduces", "MB", "others", "MB")


def _speed_cells(setting: Setting, two: Figures, one: Figures, row: Figures) -> list[str]:
    median = statistics.median(row.seconds)
    ratios = (row.ratio(two), row.processor_ratio(two), row.ratio(one), row.processor_ratio(one))
    return [
        row.contender,
        f"{median:.2f}",
        f"{min(row.seconds):.2f}",
        f"{setting.batch / median:.1f}",
        *(f"{ratio:.3f}" for ratio in ratios),
    ]


def _demand_cells(results: Results, row: Figures) -> list[str]:
    rate = row.flops / statistics.median(row.seconds)
    reduces = [call for call in row.collectives if call.reduces]
    others = [call for call in row.collectives if not call.reduces]
    return [
        row.contender,
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f}",
        f"{rate / 1e9:,.0f}",
        f"{100 * rate / results.matrix_rate:.0f}%",
        *(cell for calls in (reduces, others) for cell in (str(_calls(calls)), f"{_bytes(calls) / 1e6:.2f}")),
    ]


def _calls(collectives: Sequence[Collective]) -> int:
    return sum(call.calls for call in collectives)


def _bytes(collectives: Sequence[Collective]) -> int:
    return sum(call.bytes for call in collectives)


def _memory_table(results: Results) -> Table:
    batches = sorted({batch for peaks in results.memory.values() for batch in peaks})
    rows = [
        [name, *(f"{peaks[batch] / 1e6:,.0f}" if batch in peaks else "-" for batch in batches)]
        for name, peaks in results.memory.items()
    ]
    for name, size in (("pixels of a rank", results.pixels), ("descriptors of all", results.descriptors)):
        rows.append([name, *(f"{size * batch / 1e6:,.0f}" for batch in batches)])
    title = "peak memory of a rank by B, MB beside network, optimiser and pixels"
    return text_table(title, "", ("contender", *map(str, batches)), rows)
