"""`distap plan`: the cost of a recipe's steps for numbers of GPUs, as tables and as JSON."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.tables import figures_table
from distap.apps.plan.inputs import NetworkFacts, Workload
from distap.apps.plan.step import Step
from distap.errors import DistapError
from distap.storage.atomic import write_whole

DURATIONS = (("days", 1.0), ("h", 1 / 24), ("min", 1 / 1440))
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Check:
    """A step that was measured, beside its prediction; seconds by stage."""

    what: str
    measured: dict[str, float]
    predicted: dict[str, float]


@dataclass(frozen=True)
class Plan:
    """Predictions, what they rest on, and how well they fit what was measured."""

    network: str
    steps: Sequence[Step]
    assumptions: Sequence[str]
    checks: Sequence[Check] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """For the terminal."""
        tables = [
            _summary(self.steps),
            _parts("seconds a step", [step.seconds for step in self.steps], self.steps, _milliseconds),
            _parts("memory of a GPU, GB", [step.memory.parts for step in self.steps], self.steps, _gigabytes),
        ]
        if any(step.sent for step in self.steps):
            tables.append(
                _parts("sent by a GPU in a step, MB", [step.sent for step in self.steps], self.steps, _megabytes)
            )
        return tables + [_check(check) for check in self.checks]

    def write(self, path: Path) -> None:
        """As JSON: seconds, bytes, and bytes a second."""
        plan = {
            "network": self.network,
            "assumptions": list(self.assumptions),
            "steps": [figures(step) for step in self.steps],
            "checks": [asdict(check) for check in self.checks],
        }
        write_whole(path, json.dumps(plan, indent=2) + "\n")


def figures(step: Step) -> dict[str, Any]:
    """All that is predicted of a step."""
    memory = step.memory
    return {
        "gpus": step.ranks,
        "images_a_gpu": memory.share,
        "replay_size": memory.replay_size,
        "kept": memory.kept,
        "seconds": step.seconds,
        "seconds_a_step": step.total_seconds,
        "images_per_second": step.images_per_second,
        "efficiency": step.efficiency,
        "communication_share": step.communication_share,
        "days": step.days,
        "sent": step.sent,
        "memory": memory.parts,
        "host_memory": memory.host,
        "fits": memory.fits,
        "greatest_replay_size": memory.greatest_replay_size,
        "greatest_keep": memory.greatest_keep,
    }


def numbers_of_gpus(text: str, batch: int) -> list[int]:
    """Those that `text`, such as `1,8,64`, names, but for those with more GPUs than images.

    Raises:
        DistapError: it is no such list, or none is left.
    """
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise DistapError(f"--gpus {text!r}: expected numbers with commas between them, such as 1,8,64")
    numbers = sorted({int(number) for number in text.split(",")})
    possible = [number for number in numbers if number <= batch]
    if not possible:
        raise DistapError(f"--gpus {text!r}: a batch of {batch} images has none for some of them; fewer are possible")
    return possible


def bytes_per_second(text: str) -> float:
    """A link's rate: `400Gb` is bits a second, `50GB` bytes a second.

    Raises:
        DistapError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(b|bit|B)(?:/s|ps)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise DistapError(f"--link {text!r}: expected a rate, such as 400Gb for bits or 50GB for bytes a second")
    return float(match[1]) * UNITS[match[2]] / (1 if match[3] == "B" else 8)


def common_assumptions(workload: Workload, facts: NetworkFacts) -> list[str]:
    """What every prediction rests on, in words."""
    sharding = workload.sharding
    kept = "as many as fit" if workload.keep is None else str(workload.keep)
    forward, backward = (sum(operation.flops.each for operation in each) for each in (facts.forward, facts.backward))
    lines = [
        f"an image costs {_counted(forward)} FLOP forward and {_counted(backward)} backward, and "
        f"{facts.graph.each / 1e6:,.1f} MB of activations to keep, counted operation by operation; "
        f"{facts.parameters / 1e6:,.1f} million parameters, {facts.dimensions} dimensions",
        f"B is {workload.batch} on any number of GPUs; micro-batches of {workload.replay_size} images, of "
        f"which {kept} keep their graph; every image "
        "has a gradient and none is damaged",
        "images are loaded, decoded and copied while the network works: the loaders keep up with images/s",
        "a ring for what ranks send each other, as fast as its slowest link; latency by the logarithm of the ranks",
        "no rank waits for a slower one; checkpoints and evaluations come on top",
    ]
    if workload.bins is None:
        lines.append("a loss by rows of similarities is taken to cost a pair what AP_Q costs, which is too little")
    if sharding.hides_reduction:
        lines.append("gradients are reduced while the last backward pass goes on")
    if sharding.gathers:
        lines.append(
            f"weights are gathered {sharding.gathers} times for each replayed micro-batch, {sharding.unit:.0%} "
            "of them at once, and nothing hides it"
        )
    return lines


def _summary(steps: Sequence[Step]) -> Table:
    headings = (
        "GPUs",
        "images",
        "s/step",
        "images/s",
        "efficient",
        "waits",
        "all steps",
        "GB",
        "micro-batch",
        "keep",
    )
    caption = (
        "images: of a GPU. efficient: images/s of a GPU, relative to one GPU alone. waits: share of a step that "
        "waits for other ranks. GB: of a GPU, with a ! where it is too much. micro-batch, keep: the most that fit."
    )
    return figures_table("a step", caption, headings, map(_summary_row, steps))


def _summary_row(step: Step) -> list[str]:
    memory = step.memory
    return [
        f"{step.ranks:,}",
        f"{memory.share:,}",
        f"{step.total_seconds:.3g}",
        f"{step.images_per_second:,.0f}",
        f"{step.efficiency:.0%}",
        f"{step.communication_share:.1%}",
        _duration(step.days),
        _gigabytes(sum(memory.parts.values())) + ("" if memory.fits else " !"),
        str(memory.greatest_replay_size),
        str(memory.greatest_keep),
    ]


def _parts(
    title: str, by_step: Sequence[dict[str, float]], steps: Sequence[Step], written: Callable[[float], str]
) -> Table:
    """A row for each number of GPUs, a column for each part that any of them has."""
    names = list(dict.fromkeys(name for parts in by_step for name in parts))
    rows = [
        [f"{step.ranks:,}", *(written(parts.get(name, 0.0)) for name in names), written(sum(parts.values()))]
        for step, parts in zip(steps, by_step, strict=True)
    ]
    return figures_table(title, "", ["GPUs", *names, "all"], rows)


def _check(check: Check) -> Table:
    stages = {**check.measured, "all": sum(check.measured.values())}
    predicted = {**check.predicted, "all": sum(check.predicted.values())}
    rows: Iterable[list[str]] = [
        ["measured", *map(_milliseconds, stages.values())],
        ["predicted", *(_milliseconds(predicted[stage]) for stage in stages)],
    ]
    return figures_table(f"seconds of {check.what}", "", ["", *stages], rows)


def _duration(days: float) -> str:
    unit, length = next((pair for pair in DURATIONS if days >= pair[1]), DURATIONS[-1])
    return f"{days / length:,.1f} {unit}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 1 else f"{seconds:,.2f}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _counted(flops: float) -> str:
    return f"{flops / 1e9:,.2f} G"
