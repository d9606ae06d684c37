"""What grows with the data set and with the step: drawing a batch should not, opening the index does."""

import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from typer import Option

from benchmarks import harness
from distap.data.plan import Classes, Plan, Sampling
from distap.data.sampling.classes import ClassesSampling
from distap.data.sampling.p_by_k import PByKSampling, SuperPByKSampling
from distap.data.sampling.random import RandomSampling
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.world import World

STEPS = (0, 10**3, 10**6, 10**9)
IMAGES_A_CLASS, IMAGES_A_SHARD, GROUPS = 10, 1000, 12
FEW_CLASSES = 1000  # of the samplings that take every class
PLAN_COLUMNS = "sampling={sampling}|N={images:,}|classes s={opened:.2f}|" + "|".join(
    f"step {step:,} ms={{at_{step}:,.1f}}" for step in STEPS
)
INDEX_COLUMNS = (
    "index of N={images:,}|file MB={file_mb:,.1f}|opened s={opened:.2f}|held MB={held_mb:,.0f}|peak MB={peak_mb:,.0f}"
)


class ScaleBenchmark(harness.Benchmark):
    """Print the milliseconds that a batch takes to draw, by the size of the data set and the step; open indexes.

    Data sets are made up, with ten images a class; those of the sampling `classes` have 1,000 classes in all. Each
    row is measured in a process of its own.
    """

    name: ClassVar[str] = "scale"
    images: Annotated[list[int], Option(help="Images of a data set; repeat for several.")] = [10**5, 10**6, 10**7]
    index: Annotated[list[int], Option(help="Images of an index that is opened.")] = [10**5, 10**6]
    batch: Annotated[int, Option(help="Images of a global batch.", min=4000)] = 4096
    sampling: Annotated[list[str], Option(help="Ways to sample.")] = ["random", "p_by_k", "super_p_by_k", "classes"]

    def report(self) -> harness.Report:
        no_index = {"index": list[int]()}
        drawn = [
            {"images": [images], "sampling": [sampling], **no_index}
            for sampling in self.sampling
            for images in self.images
        ]
        plans = [self._measured(settings) for settings in drawn]
        indexes = [self._measured({"images": list[int](), "index": [images]}) for images in self.index]
        tables = [
            harness.table_of(f"Drawing a batch of {self.batch:,}", "", plans, PLAN_COLUMNS),
            harness.table_of("Opening the index of a data set", "", indexes, INDEX_COLUMNS),
        ]
        return harness.Report(plans + indexes, tables)

    def _measured(self, settings: dict[str, Any]) -> Any:
        return harness.measure_on_ranks(self.model_copy(update=settings), 1, 1)

    def on_rank(self, world: World) -> dict[str, Any]:
        return self._plan() if self.images else self._index()

    def _plan(self) -> dict[str, Any]:
        [images], [sampling] = self.images, self.sampling
        count = FEW_CLASSES if sampling == "classes" else images // IMAGES_A_CLASS
        labels = np.arange(images, dtype=np.int64) % count
        groups = np.array([f"group {number}" for number in range(GROUPS)])[np.arange(count) % GROUPS]
        started = time.perf_counter()
        classes = Classes(labels, groups)
        plan = Plan(classes, self._samplings()[sampling], 0)
        plan.batch(1)
        row = {"sampling": sampling, "images": images, "opened": time.perf_counter() - started}
        for step in STEPS:
            started = time.perf_counter()
            plan.batch(step)
            row[f"at_{step}"] = 1e3 * (time.perf_counter() - started)
        return row

    def _samplings(self) -> dict[str, Sampling]:
        return {
            "random": RandomSampling(self.batch),
            "p_by_k": PByKSampling(self.batch // 4, 4),
            "super_p_by_k": SuperPByKSampling(self.batch // 4, 4),
            "classes": ClassesSampling(self.batch),
        }

    def _index(self) -> dict[str, Any]:
        [images] = self.index
        with tempfile.TemporaryDirectory() as folder:
            made_up_index(images).save(folder)
            size = (Path(folder) / "index.npz").stat().st_size
            started = time.perf_counter()
            load_index(folder, compare=False)
            opened = time.perf_counter() - started
            tracemalloc.start()
            index = load_index(folder, compare=False)
            held, peak = tracemalloc.get_traced_memory()
        return {
            "images": len(index),
            "file_mb": size / 1e6,
            "opened": opened,
            "held_mb": held / 1e6,
            "peak_mb": peak / 1e6,
        }


def made_up_index(images: int) -> Index:
    """An index of images that are not there, ten a class and a thousand a shard."""
    rows, shards, classes = np.arange(images), -(-images // IMAGES_A_SHARD), images // IMAGES_A_CLASS
    size = np.full(images, 50_000)
    return Index(
        shard=(rows // IMAGES_A_SHARD).astype(np.int32),
        offset=rows % IMAGES_A_SHARD * 51_200,
        size=size,
        crc32=np.zeros(images, dtype=np.uint32),
        label=rows % classes,
        width=np.full(images, 800, dtype=np.int32),
        height=np.full(images, 600, dtype=np.int32),
        key=np.char.mod("%012d", rows),
        path=np.full(images, ""),
        shard_name=np.char.mod("%06d.tar", np.arange(shards)),
        shard_size=np.full(shards, IMAGES_A_SHARD * 51_200),
        shard_sha256=np.full(shards, "0" * 64),
        class_name=np.char.mod("class %d", np.arange(classes)),
        class_group=np.full(classes, ""),
    )
