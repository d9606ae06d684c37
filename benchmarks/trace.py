"""Count the files and lines of distap that one training step runs: how much a reader of the step has to read."""

import sys
import threading
from collections import defaultdict
from types import FrameType
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typer import Option

import distap
from benchmarks.contenders import SeededBatch, adam
from benchmarks.harness import Benchmark, FiguresTable, Report
from distap.ranking.loss import build_loss
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.replica import Replica
from distap.step import ThreeStages
from distap.training.learner import Learner
from distap.training.training_step import TrainingStep
from distap.world import World

PACKAGE = f"{distap.__path__[0]}/"


class TinyNetwork(nn.Module):
    """A network without any code of distap: one convolution, a mean over the places, length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, 16) of images (n, 3, h, w) in bytes."""
        return normalize(self.convolution(images.float() / 255).mean((2, 3)))


def traced_step(loss: str) -> dict[str, set[int]]:
    """Run one step of one rank on the CPU and return the lines of distap that it ran, by file.

    Only `TrainingStep.__call__` is traced, and only in its second step, so that what is built once does not count.
    File names are relative to the package. The batch has 32 images in 4 micro-batches; all of them are replayed.

    Args:
        loss: name of a loss, with its defaults.
    """
    torch.manual_seed(0)
    world = World()
    network = TinyNetwork()
    optimizer = adam(network)
    replica = Replica(network, world)
    stages = ThreeStages(replica, build_loss(loss), world, 0, MicroBatchSizes(8))
    step = TrainingStep(stages, Learner(replica, optimizer))
    batch = SeededBatch(32, 32, 4, world)
    step(batch, 1e-4)
    lines: dict[str, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        if event == "line":
            lines[file.removeprefix(PACKAGE)].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        step(batch, 1e-4)
    finally:
        sys.settrace(before)
        threading.settrace(None)
    return dict(lines)


class TraceBenchmark(Benchmark):
    """Print how many files and lines of distap one training step of one rank runs."""

    name: ClassVar[str] = "trace"
    loss: Annotated[str, Option(help="Loss to rank with, by name.")] = "ap_q"

    def report(self) -> Report:
        lines = {file: len(found) for file, found in traced_step(self.loss).items()}
        rows = [[file, str(lines[file])] for file in sorted(lines, key=lambda file: -lines[file])]
        rows.append([f"{len(lines)} files", str(sum(lines.values()))])
        return Report(lines, [FiguresTable(f"lines that a step with {self.loss} runs", "", ("file", "lines"), rows)])
