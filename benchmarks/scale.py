"""What grows with the data set, the step and the ranks, and what must not."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typer import Option

from benchmarks import harness
from benchmarks.data_sets import IMAGES_A_SHARD, SHARDS, SIDE, write_repeated
from benchmarks.many_ranks import evaluation_of, stage_two_of, step_of, store_of
from benchmarks.measuring import private_bytes
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob
from distap.data.mixing import mixed
from distap.data.plan import MixedClasses, Plan, Sampling
from distap.data.sampling import ClassesSampling, PByKSampling, RandomSampling, SuperPByKSampling
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.telemetry.terminal import track
from distap.world import World

STEPS = (0, 10**3, 10**6, 10**9)
IMAGES_A_CLASS = 10
FEW_CLASSES = 1000  # of the sampling that takes every class
# Rows of batches from several sets, by the value of sampling.mix.
MIXED: dict[str, Literal["all", "one"]] = {"p_by_k, all sets": "all", "p_by_k, one set": "one"}
PIXEL_STEP = 10**6  # at which the first pixels are read
INDEX_COLUMNS = (
    "N={images:,}|file MB={file_mb:,.1f}|first s={first:.2f}|later s={later:.2f}|"
    "first pixels s={pixels:.2f}|rank MB={rank_mb:,.1f}|worker MB={worker_mb:,.1f}"
)
INDEX_CAPTION = (
    "columns: files that the processes of a host share. first: opening by the first process of a"
    f" host. later: by another process. first pixels: from a loader's start at step {PIXEL_STEP:,}"
    " to its first images. rank: private memory that an open index takes. worker: all private"
    " memory of a process that reads images for the rank."
)
BATCH_COLUMNS = (
    "sampling={sampling}|N={images:,}|"
    + "|".join(f"step {step:,} ms={{at_{step}:,.1f}}" for step in STEPS)
    + "|private MB={private_mb:,.1f}"
)


STAGES = ("describe", "gather", "rank", "replay", "reduce", "optimizer")
STEP_BATCH = 512
PAIRS_OF = 60_000
DIMENSIONS = 256
LEAST_OF_A_RANK = 1024
STEP_CAPTION = (
    f"Seconds of each stage of a step, B = {STEP_BATCH}, with a tiny network; the ranks share this"
    " machine's cores. MB: private memory of a rank."
)
STEP_COLUMNS = (
    "ranks={ranks}|"
    + "|".join(f"{name}={{{name}:.3f}}" for name in STAGES)
    + "|MB={private_mb:,.0f}"
)
MANY_CAPTION = (
    f"The part of one rank, with the rows of the others given; C = {DIMENSIONS}, one thread. MB:"
    " its peak. gathered: of that, what arrives from all ranks."
)
MANY_COLUMNS = (
    "B={batch:,}|ranks={ranks:,}|stage two s={seconds:,.1f}|MB={peak_mb:,.0f}|formula"
    " MB={formula_mb:,.0f}|gathered={gathered_mb:,.0f}"
)
SHARED_COLUMNS = (
    "ranks={ranks:,}|all pairs s={seconds:,.1f}|beat ms={round_ms:,.1f}|case ms={case_ms:,.1f}"
)
SHARED_CAPTION = (
    f"all pairs: one rank's part of ranking {PAIRS_OF:,} images for each. beat: the heartbeats of"
    " all in a second. case: one rank reads them."
)


class ScaleBenchmark(harness.Benchmark):
    """Print what grows: with the images of a data set, with the step, and with the ranks.

    Data sets are made up, with ten images a class; those of the sampling `classes` have 1,000
    classes in all. With --sets, batches are also drawn from as many sets that have these images
    together. Each row is measured in a process of its own. Linux only. 100 million images
    take 20 GB of disk and of memory.
    """

    name: ClassVar[str] = "scale"
    images: Annotated[list[int], Option(help="Images of a data set; repeat for several.")] = [
        10**5,
        10**6,
        10**7,
    ]
    batch: Annotated[int, Option(help="Images of a global batch.", min=4000)] = 4096
    sampling: Annotated[list[str], Option(help="Ways to sample.")] = [
        "random",
        "p_by_k",
        "super_p_by_k",
        "classes",
    ]
    sets: Annotated[int, Option(help="Data sets of a mixture; 0 measures none.", min=0)] = 20
    ranks: Annotated[list[int], Option(help="Ranks on this machine that do a step.")] = [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    simulated: Annotated[list[int], Option(help="Ranks of which one is measured.")] = [
        1,
        8,
        64,
        256,
        1024,
    ]
    stage_two: Annotated[
        list[int], Option(help="B whose stage two is measured; from 1,024 images a rank on.")
    ] = [
        65_536,
        262_144,
        1_048_576,
    ]
    shards: Annotated[Path | None, Option(help="Data set to measure.", hidden=True)] = None
    row: Annotated[str, Option(help="What to measure of it.", hidden=True)] = ""

    def report(self) -> harness.Report:
        indexes = []
        batches = []
        for images in track(self.images, "measuring data sets", len(self.images)):
            for classes in (images // IMAGES_A_CLASS, FEW_CLASSES):
                samplings = [
                    name
                    for name in self.sampling
                    if (name == "classes") == (classes == FEW_CLASSES)
                ]
                with tempfile.TemporaryDirectory(prefix="distap-bench-") as folder:
                    write_repeated(Path(folder), images, classes)
                    first = self._measured(folder, "first")
                    if classes != FEW_CLASSES:
                        indexes.append(first | self._measured(folder, "later"))
                    batches += [self._measured(folder, name) for name in samplings]
            batches += self._of_mixture(images)
        steps = [
            harness.measure_on_ranks(self.model_copy(update={"row": "step"}), rank_count, 1)
            for rank_count in self.ranks
        ]
        steps = [{**step, **dict.fromkeys(STAGES, 0.0), **step["stages"]} for step in steps]
        many = [
            self._of_many("stage two", ranks, batch)
            for batch in self.stage_two
            for ranks in self.simulated
            if batch // ranks == LEAST_OF_A_RANK
        ]
        shared = [self._of_many("shared", ranks) for ranks in self.simulated]
        tables = [
            harness.table_of(
                "Opening the index of a data set", INDEX_CAPTION, indexes, INDEX_COLUMNS
            ),
            harness.table_of(f"Drawing a batch of {self.batch:,}", "", batches, BATCH_COLUMNS),
            harness.table_of("A step of several ranks", STEP_CAPTION, steps, STEP_COLUMNS),
            harness.table_of("Stage two of one of many ranks", MANY_CAPTION, many, MANY_COLUMNS),
            harness.table_of("What many ranks share", SHARED_CAPTION, shared, SHARED_COLUMNS),
        ]
        return harness.Report(indexes + batches + steps + many + shared, tables)

    def _of_mixture(self, images: int) -> list[harness.Row]:
        """Return the rows of batches from several sets of equal size and weight."""
        if not self.sets:
            return []
        size = max(images // self.sets // IMAGES_A_SHARD, 1) * IMAGES_A_SHARD
        classes = size // IMAGES_A_CLASS
        with tempfile.TemporaryDirectory(prefix="distap-bench-") as folder:
            for number in range(self.sets):
                write_repeated(Path(folder, SHARDS, f"{number:03}"), size, classes)
            # A batch of one set needs as many classes there.
            rows = [name for name in MIXED if MIXED[name] == "all" or classes >= self.batch // 4]
            return [self._measured(folder, name) for name in rows]

    def _of_many(self, row: str, ranks: int, batch: int = 0) -> harness.Row:
        of_row = self.model_copy(update={"row": row, "simulated": [ranks], "stage_two": [batch]})
        found: harness.Row = harness.measure_on_ranks(of_row, 1, 1)
        return found

    def _measured(self, folder: str, row: str) -> harness.Row:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        of_row = self.model_copy(update={"shards": Path(folder, SHARDS), "row": row})
        found: harness.Row = harness.measure_on_ranks(of_row, 1, 1)
        return found

    def on_rank(self, world: World) -> harness.Row:
        if self.row == "step":
            return step_of(world, STEP_BATCH)
        if self.row == "stage two":
            return stage_two_of(self.simulated[0], self.stage_two[0], DIMENSIONS)
        if self.row == "shared":
            [ranks] = self.simulated
            return evaluation_of(ranks, PAIRS_OF, DIMENSIONS) | store_of(ranks)
        assert self.shards is not None
        if self.row == "first":
            return _first(self.shards)
        return _later(self.shards, world) if self.row == "later" else self._drawn(self.shards)

    def _drawn(self, shards: Path) -> harness.Row:
        samplings: dict[str, Sampling] = {
            "random": RandomSampling(self.batch),
            "p_by_k": PByKSampling(self.batch // 4, 4),
            "super_p_by_k": SuperPByKSampling(self.batch // 4, 4),
            "classes": ClassesSampling(self.batch),
        }
        before = private_bytes()
        if self.row in MIXED:
            plan = self._mixed_plan(shards)
        else:
            plan = Plan(load_index(shards, compare=False).classes, samplings[self.row], 0)
        plan.batch(1)
        row = {"sampling": self.row, "images": len(plan.classes)}
        for step in STEPS:
            row[f"at_{step}"] = 1e3 * _seconds(partial(plan.batch, step))
        return row | {"private_mb": (private_bytes() - before) / 1e6}

    def _mixed_plan(self, folder: Path) -> Plan:
        """Return the plan of batches from the sets in a folder, which weigh alike."""
        indexes = [load_index(place / SHARDS, compare=False) for place in sorted(folder.iterdir())]
        sampling = PByKSampling(self.batch // 4, 4, mix=MIXED[self.row])
        weights = {str(number): Fraction(1) for number in range(len(indexes))}
        return Plan(MixedClasses([index.classes for index in indexes]), mixed(sampling, weights), 0)


def _first(shards: Path) -> harness.Row:
    seconds = _seconds(lambda: load_index(shards, compare=False))
    return {"first": seconds, "file_mb": (shards / "index.npz").stat().st_size / 1e6}


def _later(shards: Path, world: World) -> harness.Row:
    before = private_bytes()
    seconds = _seconds(lambda: load_index(shards, compare=False))
    after = private_bytes()
    settings = PByKSampling(1024, 4)
    job = LoadingJob(
        parse_source(shards), settings, 0, ((0, SIDE, CropFlipColour().transform(SIDE)),), workers=1
    )
    started = time.perf_counter()
    images = IndexedSource().open(job, world, Stopwatch())
    shares = iter(images.shares(range(PIXEL_STEP, PIXEL_STEP + 1)))
    next(shares).images(slice(0, job.chunk))
    pixels = time.perf_counter() - started
    [worker] = multiprocessing.active_children()
    return {
        "images": len(images.plan.classes),
        "later": seconds,
        "pixels": pixels,
        "rank_mb": (after - before) / 1e6,
        "worker_mb": private_bytes(worker.pid) / 1e6,
    }


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
