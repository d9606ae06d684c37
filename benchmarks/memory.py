"""Peak memory of a rank by batch size: it should grow by pixels and descriptors only."""

from typing import Annotated, ClassVar

import torch
from typer import Option

from benchmarks import harness
from benchmarks.contenders import IMAGES_A_CLASS, DistapStep, SeededBatch, Task, seeded_network
from distap.ranking.losses.quantized import QuantizedAP
from distap.telemetry.metrics import host_memory_peak
from distap.world import World

COLUMNS = (
    "B={batch}|peak MB={peak_mb:,.0f}|above first={above:+,.0f}|pixels MB={pixels_mb:,.0f}|"
    "descriptors MB={descriptors_mb:,.0f}|seconds a step={seconds:.1f}"
)


class MemoryBenchmark(harness.Benchmark):
    """Print a rank's peak memory by batch size: it should grow by pixels and descriptors only.

    Each batch size runs in a process of its own, since a process never gives its peak back.
    """

    name: ClassVar[str] = "memory"
    batch: Annotated[list[int], Option(help="Images of a global batch; repeat for several.")] = [
        256,
        1024,
        4096,
    ]
    image_size: harness.ImageSize = 64
    micro_batch: harness.MicroBatch = 16
    backbone: harness.Backbone = "tf_efficientnet_lite0"

    def report(self) -> harness.Report:
        settings = [self.model_copy(update={"batch": [size]}) for size in self.batch]
        rows = [
            harness.measure_on_ranks(setting, 1, torch.get_num_threads()) for setting in settings
        ]
        shown = [
            {f"{name}_mb": row[name] / 1e6 for name in ("peak", "pixels", "descriptors")} | row
            for row in rows
        ]
        for row in shown:
            row["above"] = row["peak_mb"] - shown[0]["peak_mb"]
        title = (
            f"peak memory of a rank: {self.backbone}, {self.image_size} px, micro-batches of"
            f" {self.micro_batch}"
        )
        return harness.Report(rows, [harness.table_of(title, "", shown, COLUMNS)])

    def on_rank(self, world: World) -> dict[str, float]:
        torch.set_flush_denormal(True)
        batch = SeededBatch(self.batch[0], self.image_size, IMAGES_A_CLASS, world)
        network = seeded_network(self.backbone, "random")
        step = DistapStep(Task(network, batch, self.micro_batch, QuantizedAP(), world))
        step()
        return {
            "batch": batch.total,
            "peak": host_memory_peak(),
            "pixels": batch.pixels.nbytes,
            "descriptors": 4 * batch.total * network.dimensions,
            "seconds": sum(spent for stage, spent in step.seconds[0].items() if stage != "network"),
        }
