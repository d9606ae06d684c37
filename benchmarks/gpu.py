"""What a GPU does with distap, in about fifteen minutes: is it exact, and how fast beside what it
must do.

Each part runs in a process of its own, with its own time limit, and what was found is written after
each. All parts take one card: nothing has been measured on two. The columns of fp16 are newer than
the last run on a card.
"""

import copy
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from typer import Option

from benchmarks import harness
from benchmarks.contenders import (
    IMAGES_A_CLASS,
    DistapStep,
    Floor,
    SeededBatch,
    Task,
    seeded_network,
)
from benchmarks.evaluation import labelled_set
from benchmarks.measuring import matrix_rate, memory_rate, relative_difference
from benchmarks.photos import jpeg, packed, photo
from benchmarks.ranking import OF_TEACHER, WRAPPERS, dense_product
from benchmarks.step import GRAPHS_KEPT, TWO_PASSES, StepBenchmark
from distap.config.sections import PrecisionName
from distap.data.converters.landmarks import OF_LANDMARKS
from distap.data.images.augmentation import CropFlipColour
from distap.data.images.decoding import EncodedImage
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob, ShareOfBatch
from distap.data.sampling import RandomSampling
from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.ranking import compiling
from distap.ranking.gather import gather
from distap.ranking.loss import SizedLoss
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank_descriptors
from distap.registry import REGISTRY
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.row_blocks import installed_faiss, nearest
from distap.retrieval.truth import Truth, class_truth
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import ThreeStages
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.training.engines import DDPSettings, DeepSpeedSettings, FSDPSettings
from distap.training.learner import TrainingStep
from distap.world import CPU, World

# SiMix around recall@k, its usual inner loss, has no gradient here: many virtual images come before
# each positive.
LOSSES: dict[str, Any] = {
    **{name: name for name in REGISTRY["loss"] if name not in (*WRAPPERS, *OF_TEACHER)},
    "simix": {"name": "simix", "inner": "smooth_ap"},
}
ENGINES: dict[str, Any] = {
    "ddp": DDPSettings(),
    "fsdp": FSDPSettings(),
    **{f"zero {stage}": DeepSpeedSettings(stage=stage) for stage in (1, 2, 3)},
}
DIMENSIONS = 512
# of plain gradient descent, by whose step a gradient is measured: large, so that rounding is small
RATE = 1e4
PHOTOS = 16  # different ones that a loader reads; more are copies
STEPS = ["distap", GRAPHS_KEPT, "Multistage", "cached gradients"]
# Of the histogram's pairs, half of the matrix by symmetry: products of pass one and, both ways, of
# pass two; and the bytes that must cross the device's memory: a similarity twice, its bin twice,
# and its slope three times.
PRODUCTS = 1.5
PAIR_BYTES = (2 * 4 + 2 * 1 + 3 * 4) / 2


def _describe_file(describer: ImageDescriber, file: bytes) -> torch.Tensor:
    return describer.describe_pixels([describer.sizing(EncodedImage(file))], 1)


class Part(NamedTuple):
    """One part of the benchmark."""

    seconds: int  # after which it is ended
    measure: Callable[["GPUBenchmark", World], harness.Report]


class GPUBenchmark(harness.Benchmark):
    """Print what a GPU does with distap: exactness, ranking, the step, evaluation, describing, and
    tests marked gpu.

    With `--quick`, small sizes, to see that everything runs. `--device cpu` leaves GPUs alone.
    """

    name: ClassVar[str] = "gpu"
    out: Annotated[
        Path | None, Option(help="Folder to write gpu.json and gpu.html to, after each part.")
    ] = None
    device: Annotated[Literal["cuda", "cpu"], Option(help="What to measure.")] = "cuda"
    quick: Annotated[bool, Option("--quick", help="Small sizes.")] = False
    part: Annotated[list[str], Option(help="Measure this part; repeat for several.")] = []
    rounds: harness.Rounds = 3

    def report(self) -> harness.Report:
        unknown = set(self.part) - set(PARTS)
        if unknown:
            raise DistapError(
                "command.wrong_option",
                f"--part {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}",
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise DistapError("package.no_gpu", "no GPU is here; --device cpu measures the CPU")
        if self.out is not None:
            self.json_file = self.out / "gpu.json"
            self.page = self.out / "gpu.html"
        whole = harness.Report({}, [], [])
        for name in self.part or PARTS:
            started = time.perf_counter()
            try:
                figures = self._in_a_process(name)
                whole.tables.extend(harness.FiguresTable(*table) for table in figures["tables"])
                outcome = "done"
                notes = figures["notes"]
                whole.figures[name] = figures["figures"]
            except DistapError as error:
                outcome = "failed"
                notes = [str(error)]
                whole.figures[name] = {"failed": str(error)}
            spent = f"{name}: {outcome} after {time.perf_counter() - started:.0f} s"
            print(spent, flush=True)
            whole = whole._replace(notes=[*whole.notes, spent, *notes])
            self.write(whole)
        return whole

    def _in_a_process(self, name: str) -> Any:
        """Measure a part in a process of its own; a DistapError if it fails or takes too long."""
        of_part = self.model_copy(update={"part": [name]})
        return harness.measure_in_time(of_part, name, PARTS[name].seconds, self.device)

    def on_rank(self, world: World) -> harness.Row:
        figures, tables, notes = PARTS[self.part[0]].measure(self, world)
        return {"figures": figures, "tables": tables, "notes": list(notes)}

    def _sized(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def _exactness(self, world: World) -> harness.Report:
        """A step's gradient beside that in float64 on the CPU, by loss and precision, then by
        engine.
        """
        exact = exactness_task(World(), torch.float64, self._sized(64, 32))
        task = exactness_task(world, torch.float32, self._sized(64, 32))
        rows = []
        wanted = {name: gradient_of_step(exact, name) for name in LOSSES}
        for name in LOSSES:
            row: harness.Row = {"what": name}
            for title, (precision, tf32) in PRECISIONS.items():
                with tf32_allowed(tf32):
                    row[title] = relative_difference(
                        gradient_of_step(task, name, precision), wanted[name]
                    )
            rows.append(row)
        for name, engine in ENGINES.items():
            if name.startswith("zero") and not importlib.util.find_spec("deepspeed"):
                continue
            row = {"what": f"ap_q, {name}"}
            for title in ("float32", "bf16", "fp16"):
                if title == "fp16" and name.startswith("zero"):  # refused: it has another scale
                    continue
                with tf32_allowed(False):
                    gradient = gradient_of_step(task, "ap_q", PRECISIONS[title][0], engine)
                row[title] = relative_difference(gradient, wanted["ap_q"])
            rows.append(row)
        columns = "|".join(["what={what}", *(f"{title}={{{title}:.0e}}" for title in PRECISIONS)])
        caption = (
            "Length of the difference over that of the whole network's gradient in float64 on the"
            " CPU."
        )
        return harness.Report(
            rows, [harness.table_of("gradient of a step", caption, rows, columns)]
        )

    def _tests(self, world: World) -> harness.Report:
        """All tests marked gpu."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/test_gpu.py",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        lines = done.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        last = lines[-1].strip("= ") if lines else "pytest said nothing"
        counts = {
            name: int(count)
            for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
        }
        why = lines if failed else []
        return harness.Report(
            {"counts": counts, "failed": failed}, [], [f"tests marked gpu: {last}", *why]
        )

    def _ranking(self, world: World) -> harness.Report:
        """AP_Q compiled and eager, next to one dense product and the least that it has to do."""
        rows = []
        bandwidth = memory_rate(world.device)
        rate = matrix_rate(world.device, torch.float32, may_use_tf32=False)
        for batch in self._sized(
            [4096, 16_384, 65_536] if self.device == "cuda" else [1024, 4096], [512]
        ):
            labels = torch.arange(batch, device=world.device) // 8
            centres = torch.randn(
                batch // 8, DIMENSIONS, generator=torch.Generator().manual_seed(0)
            )
            random_descriptors = torch.randn(
                batch, DIMENSIONS, generator=torch.Generator().manual_seed(1)
            )
            descriptors = normalize(
                normalize(centres).to(world.device)[labels]
                + normalize(random_descriptors).to(world.device)
            )
            gathered = gather(
                descriptors, labels, torch.ones_like(labels, dtype=torch.bool), world, batch
            )
            ways: dict[str, harness.Turns] = {}
            for way in ("eager", "compiled"):
                candidates: dict[str, Callable[[], object]] = {
                    way: partial(rank_descriptors, QuantizedAP(), gathered),
                    "dense": dense_product(gathered),
                }
                with _counting(way):
                    for _ in range(3):  # the first calls compile, allocate, and load the GPU's code
                        for candidate in candidates.values():
                            candidate()
                    ways |= harness.take_turns(candidates, self.rounds, world)
            dense = ways.pop("dense").median
            lower_bound = max(
                PRODUCTS * 2 * batch**2 * DIMENSIONS / rate, batch**2 * PAIR_BYTES / bandwidth
            )
            for way, turns in ways.items():
                rows.append(
                    {
                        **{
                            "batch": batch,
                            "way": way,
                            "ms": 1e3 * turns.median,
                            "dense_ms": 1e3 * dense,
                        },
                        **{"x_dense": turns.median / dense, "x_least": turns.median / lower_bound},
                    }
                )
        columns = (
            "B={batch:,}|way={way}|ms={ms:,.2f}|dense ms={dense_ms:,.2f}|x dense={x_dense:.2f}|x"
            " least={x_least:.1f}"
        )
        caption = (
            f"x dense: times a B x B x {DIMENSIONS} product of float32 in the same turns. x least:"
            f" times the longer of its products at {rate / 1e12:.2f} TFLOP/s and its bytes at"
            f" {bandwidth / 1e12:.3f} TB/s, as measured."
        )
        return harness.Report(
            rows, [harness.table_of("AP_Q and its gradient", caption, rows, columns)]
        )

    def _step(
        self, world: World, backbone: str, image_size: int, batch: int, micro_batch: int
    ) -> harness.Report:
        """A step of a network beside its bare passes, cached gradients and full-batch autograd."""
        backbone, image_size = self._sized(backbone, "resnet10t"), self._sized(image_size, 64)
        batch, micro_batch = self._sized(batch, 32), self._sized(micro_batch, 8)
        settings = StepBenchmark(
            backbone=backbone,
            image_size=image_size,
            batch=batch,
            micro_batch=micro_batch,
            ranks=1,
            rounds=self.rounds,
            bf16=self.device == "cuda",
            only=STEPS,  # the loader is measured below, with as many workers as there are cores
        )
        row = settings.on_rank(world)
        of_step = settings.report_of(row)
        rows, note = fed(settings, world, self.rounds)
        columns = "step={step}|s={seconds:.3f}|images/s={rate:,.0f}|x passes={x_passes:.3f}"
        title = f"{backbone}, {image_size} px, B = {batch:,}: fed with photographs"
        caption = "x passes: times the eager passes 2f + 1b, the medians."
        tables = [*of_step.tables, harness.table_of(title, caption, rows, columns)]
        return harness.Report({"step": row, "more": rows}, tables, [*of_step.notes, note])

    def _evaluation(self, world: World) -> harness.Report:
        """Evaluation and exact search on the device, beside the CPU."""
        images, gallery = self._sized(
            (60_000, 1_000_000) if self.device == "cuda" else (5000, 50_000), (600, 1000)
        )
        descriptors, labels = labelled_set(images, DIMENSIONS)
        generator = torch.Generator().manual_seed(0)
        rows_of = [(70 + number, 140 + number) for number in range(70)]
        splits = ["Public" if number % 2 else "Private" for number in range(70)]
        gallery_descriptors = normalize(torch.randn(gallery, DIMENSIONS, generator=generator))
        rows = []
        for device in dict.fromkeys((world.device, CPU)):
            own = descriptors.to(device)
            theirs = labels.to(device)
            queries = gallery_descriptors[:70].to(device)
            on_device = gallery_descriptors.to(device)
            truth = Truth(gallery, rows_of, parts=splits, device=device)
            actions: dict[str, Callable[[], object]] = {
                f"all pairs of {images:,}": partial(
                    evaluate_descriptors, own, own, class_truth(theirs), LABELLED_FIGURES
                ),
                f"70 queries, {gallery:,} images": partial(
                    evaluate_descriptors, queries, on_device, truth, OF_LANDMARKS
                ),
            }
            gpus = _gpus_of_faiss(device)
            if gpus is not None:
                search = partial(
                    _nearest,
                    gpus,
                    gallery_descriptors[:70].numpy(),
                    gallery_descriptors.numpy(),
                    100,
                )
                actions[f"Faiss: 100 of {gallery:,}, for 70"] = search
            for description, action in actions.items():
                action()
                turns = harness.take_turns(
                    {description: action}, 1 if device is CPU else self.rounds, world
                )
                rows.append(
                    {
                        "what": description,
                        "device": device.type,
                        "seconds": turns[description].median,
                    }
                )
        table = harness.table_of(
            "evaluation", "", rows, "what={what}|device={device}|s={seconds:.3f}"
        )
        return harness.Report(rows, [table])

    def _describing(self, world: World) -> harness.Report:
        """Images a second of describing photographs as `extract` and `serve` do."""
        backbone = self._sized("resnet50", "resnet10t")
        precision = "bf16" if self.device == "cuda" else "float32"
        network = seeded_network(backbone, "random").to(world.device)
        rows = []
        files = [jpeg(photo(512, 512, seed), 90) for seed in range(self._sized(16, 2))]
        for sizing in ("crop 224", "side 512") if not self.quick else ("crop 64",):
            describer = ImageDescriber(network, Sizing.parse(sizing), precision=precision)  # type: ignore[arg-type]
            side = int(sizing.split()[1])
            pixels = torch.zeros(
                self._sized(256 if self.device == "cuda" else 16, 4),
                3,
                side,
                side,
                dtype=torch.uint8,
            )
            candidates: dict[str, Callable[[], object]] = {
                "many": partial(describer.describe_pixels, pixels, len(pixels)),
                "one": partial(_describe_file, describer, files[0]),
            }
            for candidate in candidates.values():
                candidate()
            turns = harness.take_turns(candidates, self.rounds, world)
            rate = len(pixels) / turns["many"].median
            latency = 1e3 * turns["one"].median
            rows.append({"sizing": sizing, "rate": rate, "latency": latency})
        columns = "sizing={sizing}|images/s={rate:,.0f}|ms of one={latency:.1f}"
        caption = (
            "images/s: of pixels that are there. ms of one: an encoded photograph of 512 pixels,"
            " decoded too."
        )
        return harness.Report(
            rows, [harness.table_of(f"describing, {backbone}, {precision}", caption, rows, columns)]
        )


def fed(settings: StepBenchmark, world: World, rounds: int) -> tuple[list[harness.Row], str]:
    """The step with images that a loader reads, and how many cores must read."""
    precision: PrecisionName = "bf16" if settings.bf16 else "float32"
    network = seeded_network(settings.backbone, "random", settings.image_size).to(world.device)
    batch = SeededBatch(settings.batch, settings.image_size, IMAGES_A_CLASS, world)
    task = Task(network, batch, settings.micro_batch, QuantizedAP(), world, precision)
    eager = DistapStep(task)
    candidates: dict[str, Callable[[], None]] = {TWO_PASSES: Floor(task, True), "eager": eager}
    for candidate in candidates.values():
        candidate()
    seconds = {
        name: turn.median for name, turn in harness.take_turns(candidates, rounds, world).items()
    }
    workers = max(len(os.sched_getaffinity(0)) - 1, 1)
    with tempfile.TemporaryDirectory(prefix="distap-bench-") as folder:
        shards = _photographs(Path(folder), settings)
        shares = _read_by(workers, shards, settings, world)
        for name, use in (("eager, fed", eager.on), ("reading alone", _read)):
            use(next(shares))  # what was read before counts for nothing
            started = time.perf_counter()
            for share in itertools.islice(shares, rounds):
                use(share)
            harness.synchronise(world.device)
            seconds[name] = (time.perf_counter() - started) / rounds
        shares.close()
    cores = workers * seconds["reading alone"] / seconds["eager"]
    floor = seconds[TWO_PASSES]
    rows = [
        {
            "step": name,
            "seconds": spent,
            "rate": settings.batch / spent,
            "x_passes": spent / floor,
        }
        for name, spent in seconds.items()
    ]
    return (
        rows,
        (
            f"{workers} workers read; the eager step would need {cores:.1f} cores that read and"
            " nothing else"
        ),
    )


def exactness_task(world: World, dtype: torch.dtype, images: int) -> Task:
    """A small network and a batch, by which gradients on devices are compared."""
    network = seeded_network("resnet10t", "random").to(world.device, dtype)
    batch = SeededBatch(images, 64, IMAGES_A_CLASS, world)
    return Task(network, batch, 16, QuantizedAP(), world)


def gradient_of_step(
    task: Task, loss: str, precision: PrecisionName = "float32", engine: Any = ENGINES["ddp"]
) -> Tensor:
    """The gradient of all parameters by which a step of plain gradient descent moved them, float64
    on the CPU.
    """
    network = copy.deepcopy(task.network)
    before = _parameters(network)
    learner = engine.build(
        network,
        lambda: torch.optim.SGD(network.parameters(), lr=RATE),
        task.world,
        precision=precision,
    )
    chosen = build_loss(LOSSES[loss])
    sizes = MicroBatchSizes(task.micro_batch)
    if isinstance(chosen, SizedLoss):
        chosen = chosen.sized(task.batch.total // IMAGES_A_CLASS, network.dimensions, seed=0)
        assert chosen.learned is not None
        chosen.learned.to(network.mean.device)
    stages = ThreeStages(learner.replica, chosen, task.world, 0, sizes, max_drift=float("inf"))
    step = TrainingStep(stages, learner)
    result = step(task.batch, RATE)
    while result.skipped == "overflow":  # until the loss scale of float16 fits
        result = step(task.batch, RATE)
    if result.skipped:
        raise DistapError(
            "loss.not_finite",
            f"{loss}, {precision}: the step was skipped, a {result.skipped} is not finite",
        )
    with learner.replica.describing():  # parameters are whole inside
        return (before - _parameters(network)) / RATE


def _parameters(network: torch.nn.Module) -> Tensor:
    return torch.cat(
        [parameter.detach().double().cpu().flatten() for parameter in network.parameters()]
    )


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Whether convolutions and products of float32 may use TF32 inside."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


@contextmanager
def _counting(way: str) -> Iterator[None]:
    """Count pairs eager or compiled inside, whatever their number."""
    with patch.object(compiling, "PAYS_FROM_PAIRS", float("inf") if way == "eager" else 0):
        yield


def _photographs(folder: Path, settings: StepBenchmark) -> Path:
    """Shards of a batch of photographs, whose sides are a third longer than those of the crops."""
    side = settings.image_size * 4 // 3
    photos = [jpeg(photo(side, side, seed), 90) for seed in range(min(PHOTOS, settings.batch))]
    files = [photos[number % len(photos)] for number in range(settings.batch)]
    return packed(folder, files, "jpg", IMAGES_A_CLASS)


def _read_by(
    workers: int, shards: Path, settings: StepBenchmark, world: World
) -> Generator[ShareOfBatch]:
    """Batches of these images that workers read."""
    job = LoadingJob(
        parse_source(shards),
        RandomSampling(batch_size=settings.batch),
        seed=0,
        sizes=((0, settings.image_size, CropFlipColour().transform(settings.image_size)),),
        chunk=settings.micro_batch,
        workers=workers,
    )
    yield from IndexedSource().open(job, world, Stopwatch()).shares(range(1_000_000))


def _gpus_of_faiss(device: torch.device) -> int | None:
    """How many GPUs the installed Faiss is to use for a device; None if it cannot."""
    if not importlib.util.find_spec("faiss"):
        return None
    if device.type == "cpu":
        return 0
    return installed_faiss().get_num_gpus() or None


def _nearest(gpus: int, queries: np.ndarray, gallery: np.ndarray, k: int) -> None:
    with patch.object(installed_faiss(), "get_num_gpus", lambda: gpus):
        nearest(queries, gallery, k)


def _read(share: ShareOfBatch) -> None:
    share.images(slice(0, share.total))


PRECISIONS: dict[str, tuple[PrecisionName, bool]] = {
    "float32": ("float32", False),
    "TF32": ("float32", True),
    "bf16": ("bf16", False),
    "fp16": ("fp16", False),
}
PARTS = {
    "exactness": Part(120, GPUBenchmark._exactness),
    "tests": Part(120, GPUBenchmark._tests),
    "ranking": Part(120, GPUBenchmark._ranking),
    "describing": Part(60, GPUBenchmark._describing),
    "evaluation": Part(90, GPUBenchmark._evaluation),
    "ResNet-50": Part(240, lambda self, world: self._step(world, "resnet50", 224, 2048, 128)),
    "ViT-S/14": Part(
        240, lambda self, world: self._step(world, "vit_small_patch14_dinov2", 224, 2048, 128)
    ),
    "ResNet-101": Part(240, lambda self, world: self._step(world, "resnet101", 800, 128, 16)),
}
