"""Peak memory of a rank by batch size."""

import json
import subprocess
import sys
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from distap.engine.ddp import DDPEngine
from distap.model.backbone import TimmBackbone
from distap.model.network import build_network
from distap.model.pooling import GeMPooling
from distap.model.weights import RandomWeights
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes, Rows
from distap.step import ThreeStageStep
from distap.telemetry.metrics import host_memory_peak
from distap.world import World

IMAGES_A_CLASS = 8


class SyntheticBatch:
    """A batch of random pixels with random labels, all on one rank."""

    step = 0

    def __init__(self, total: int, image_size: int) -> None:
        self.total = total
        self.samples = range(total)
        self.labels = torch.arange(total) // IMAGES_A_CLASS
        self.present = torch.ones(total, dtype=torch.bool)
        self.pixels = torch.randint(0, 256, (total, 3, image_size, image_size), dtype=torch.uint8)

    def images(self, rows: Rows) -> Tensor:
        """Pixels of some images."""
        return self.pixels[rows]

    def blank(self, rows: Tensor) -> None:
        """Make these images black."""
        self.pixels[rows] = 0


def measure(batches: list[int], image_size: int, micro_batch: int, backbone: str) -> Table:
    """One three-stage step a batch size; a table of peak memory and of what pixels and descriptors take."""
    table = Table(title=f"peak memory of one rank: {backbone}, {image_size} px, micro-batches of {micro_batch}")
    for heading in ("B", "peak MB", "above first", "pixels MB", "descriptors MB", "seconds a step"):
        table.add_column(heading, justify="right")
    first = None
    for batch in batches:
        arguments = [str(batch), str(image_size), str(micro_batch), backbone]
        command = [sys.executable, "-m", "benchmarks.memory", *arguments]
        figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        first = first or figures
        table.add_row(
            str(batch),
            f"{figures['peak'] / 1e6:.0f}",
            f"{(figures['peak'] - first['peak']) / 1e6:+.0f}",
            f"{figures['pixels'] / 1e6:.0f}",
            f"{figures['descriptors'] / 1e6:.0f}",
            f"{figures['seconds']:.1f}",
        )
    return table


def one_step(batch_size: int, image_size: int, micro_batch: int, backbone: str) -> dict[str, float]:
    """Do one step in this process; bytes of its peak memory, of the pixels and of the descriptors; seconds."""
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    network = build_network(TimmBackbone(backbone), RandomWeights(), GeMPooling()).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
    step = ThreeStageStep(
        DDPEngine(network, lambda: optimizer, World()), QuantizedAP(), World(), 0, MicroBatchSizes(micro_batch)
    )
    batch = SyntheticBatch(batch_size, image_size)
    step(batch, 1e-4)
    stages = step.stopwatch.seconds
    return {
        "peak": host_memory_peak(),
        "pixels": batch.pixels.nbytes,
        "descriptors": batch_size * network.dimensions * 4,
        "seconds": sum(stages.values()) - stages["network"],
    }


if __name__ == "__main__":
    batch_size, image_size, micro_batch = map(int, sys.argv[1:4])
    print(json.dumps(one_step(batch_size, image_size, micro_batch, sys.argv[4])))
