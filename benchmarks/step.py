"""Time, memory and communication of a training step: distap, full-batch autograd, cached gradients,
and the floor.
"""

import os
import statistics
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import torch
import yaml
from pydantic import model_validator
from typer import Option

from benchmarks import harness
from benchmarks.contenders import (
    IMAGES_A_CLASS,
    DistapStep,
    Floor,
    LoadedStep,
    SeededBatch,
    Task,
    seeded_network,
)
from benchmarks.materialised import materialised_bytes
from benchmarks.measuring import (
    collectives_of,
    forward_flops,
    gradient_of,
    graph_bytes,
    matrix_rate,
    peaks_of,
    relative_difference,
)
from benchmarks.own_loops import (
    PACKAGES,
    CachedGradients,
    Contender,
    FullBatch,
    MultistageLoop,
    OMLPipeline,
    ReleasedRecallLoop,
    lines_of,
)
from distap.config.sections import PrecisionName
from distap.errors import DistapError
from distap.model.folding import fold_batchnorm
from distap.model.network import RetrievalNetwork
from distap.ranking.losses.building import build_loss
from distap.stages.replica import autocast
from distap.stages.sizes import free_memory
from distap.world import World

# operations of a backward pass over those of a forward pass: gradients by inputs and by weights
BACKWARD = 2.0
SHARE_OF_FREE = 0.8  # of the free memory, at most, is given to graphs
LOADED = "distap, its loader"
GRAPHS_KEPT = "distap, graphs kept"
TWO_PASSES = "floor, 2f + 1b"
ONE_PASS = "floor, 1f + 1b"
SPEED = (
    "s: median and least of the rounds, of the slowest rank. x: times the floor's wall time in the"
    " same round, the median; cpu: the same of processor time. f and b: a forward and a backward"
    " pass over all images."
)
SPEED_COLUMNS = (
    "contender={contender}|s={median:.2f}|least={least:.2f}|images/s={rate:.1f}|x"
    " 2f+1b={two_seconds:.3f}|cpu={two_processor:.3f}|x"
    " 1f+1b={one_seconds:.3f}|cpu={one_processor:.3f}"
)
DEMANDS = (
    "lines: that a user writes for the step. MB: peak of a rank beside network, optimiser and"
    " pixels. of rate: of the rate of matrix products here. reduces, others: all-reduces and other"
    " collectives of a rank, and the MB that it hands to them."
)
DEMAND_COLUMNS = (
    "contender={contender}|lines={lines}|MB={mb:,.0f}|GFLOP/s={gflops:,.0f}|of"
    " rate={share:.0%}|reduces={reduces}|MB={reduces_mb:.2f}|others={others}|MB={others_mb:.2f}"
)

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class StepBenchmark(harness.Benchmark):
    """Print time, memory and communication of a step: distap, full-batch autograd, cached
    gradients, and the floor.

    The floor is the network's forward and backward passes alone. All take turns on the same images;
    one reads them from shards by distap's loader, as a training does. Errors are those of the
    parameters' gradient, relative to autograd's. Started by torchrun, the ranks of torchrun
    measure.
    """

    name: ClassVar[str] = "step"
    backbone: harness.Backbone = "tf_efficientnet_lite0"
    weights: Annotated[
        str, Option(help="random, timm, a file, or the name of a package that has weights.")
    ] = "random"
    image_size: harness.ImageSize = 96
    loss: Annotated[str, Option(help="Loss as a recipe writes it.")] = "ap_q"
    batch: Annotated[int, Option(help="Images of a global batch, B.", min=1)] = 256
    micro_batch: harness.MicroBatch = 16
    ranks: Annotated[
        int | None, Option(help="Ranks on this machine; by default one a GPU, or two on CPUs.")
    ] = None
    threads: harness.Threads = 1  # of each rank
    rounds: harness.Rounds = 9
    bf16: Annotated[bool, Option("--bf16", help="Compute in bfloat16 instead of float32.")] = False
    memory_batch: Annotated[
        list[int], Option(help="Measure the peak memory of this B too; repeat for several.")
    ] = []
    savings: Annotated[
        bool, Option("--savings", help="Measure each saving inside the network, and all of them.")
    ] = False
    only: Annotated[
        list[str], Option(help="Measure this contender beside the floor; repeat for several.")
    ] = []

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 0)) or self.ranks or torch.cuda.device_count() or 2

    @model_validator(mode="after")
    def _check(self) -> "StepBenchmark":
        for batch in (self.batch, *self.memory_batch):
            if batch % self.world_size or batch % IMAGES_A_CLASS or batch < 2 * IMAGES_A_CLASS:
                raise DistapError(
                    "command.wrong_option",
                    f"a batch of {batch} images cannot be compared; expected a multiple of the"
                    f" ranks ({self.world_size}) and of the images of a class ({IMAGES_A_CLASS}),"
                    " and two classes at least",
                )
        return self

    def report(self) -> harness.Report | None:
        row = harness.measure_on_ranks(self, self.world_size, self.threads)
        return None if row is None else self.report_of(row)

    def on_rank(self, world: World) -> harness.Row:
        with ExitStack() as loaders:
            return self._measured(world, loaders)

    def _measured(self, world: World, loaders: ExitStack) -> harness.Row:
        precision: PrecisionName = "bf16" if self.bf16 else "float32"
        network = seeded_network(self.backbone, self.weights, self.image_size).to(world.device)
        task = self._task(self.batch, network, world, precision)
        images = task.images(task.micro_batches[0])
        with autocast(precision, world.device.type):
            forward = forward_flops(network, images)
            graph = graph_bytes(network, images)
        contenders, omitted = self._contenders(task, graph, loaders)
        gradients = {name: gradient_of(step, step.optimizer) for name, step in contenders.items()}
        exact = next(
            name
            for name in ("full batch", "cached gradients", "distap", *self.only)
            if name in contenders
        )
        errors = {
            name: relative_difference(gradient, gradients[exact])
            for name, gradient in gradients.items()
        }
        del gradients  # each is as large as the network
        collectives = {name: collectives_of(step) for name, step in contenders.items()}
        for step in contenders.values():
            if isinstance(step, DistapStep):
                step.seconds.clear()
        turns = harness.take_turns(contenders, self.rounds, world)
        # Peaks are measured last, since that gives back memory that steps would find again.
        memory = {name: {self.batch: peak} for name, peak in peaks_of(contenders, world).items()}
        rate = -world.maximum(-matrix_rate(world.device, DTYPES[precision])) * world.size
        figures = []
        for name, step in contenders.items():
            stage_seconds = step.seconds[: self.rounds] if isinstance(step, DistapStep) else []
            result = step.result if isinstance(step, DistapStep) else None
            figures.append(
                {
                    "contender": name,
                    "lines": lines_of(step),
                    "seconds": turns[name].wall,
                    "processor": turns[name].processor,
                    "peak_bytes": memory.get(name, {}).get(self.batch),
                    "flops": self.batch * forward * (step.forwards + BACKWARD),
                    "collectives": [calls._asdict() for calls in collectives[name]],
                    "error": errors[name],
                    "stages": {
                        stage: statistics.fmean(
                            seconds_of_step[stage] for seconds_of_step in stage_seconds
                        )
                        for stage in (stage_seconds or [{}])[0]
                    },
                    "kept": result.kept if result else 0,
                    "left_out": self.batch - result.replayed - result.kept if result else 0,
                }
            )
        del contenders, step
        for batch in self.memory_batch:
            other_contenders, _ = self._contenders(
                self._task(batch, network, world, precision), graph, loaders
            )
            for other in other_contenders.values():
                other()  # the first step makes the optimiser's state
            for name, peak in peaks_of(other_contenders, world).items():
                memory.setdefault(name, {})[batch] = peak
        batches = (self.batch, *self.memory_batch)
        memory["pixels of a rank"] = {
            batch: 3.0 * self.image_size**2 * batch / world.size for batch in batches
        }
        memory["descriptors of all"] = {
            batch: 4.0 * network.dimensions * batch for batch in batches
        }
        return {
            "matrix_rate": rate,
            "figures": figures,
            "memory": memory,
            "exact": exact,
            "omitted": omitted,
        }

    def _contenders(
        self, task: Task, graph: float, loaders: ExitStack
    ) -> tuple[dict[str, Contender], dict[str, str]]:
        possible, omitted = possible_contenders(task, graph)
        if self.savings:
            with_savings, without = contenders_with_savings(task, graph)
            possible, omitted = possible | with_savings, omitted | without
        unknown = set(self.only) - {*possible, *omitted, LOADED}
        if unknown:
            raise DistapError(
                "command.wrong_option",
                f"--only {unknown.pop()!r}: expected one of"
                f" {', '.join({*possible, *omitted, LOADED})}",
            )
        if not self.only or LOADED in self.only:
            possible[LOADED] = LoadedStep(task, loaders)
        wanted = {TWO_PASSES, ONE_PASS, *(self.only or possible)}
        return {name: step for name, step in possible.items() if name in wanted}, omitted

    def _task(
        self, batch: int, network: RetrievalNetwork, world: World, precision: PrecisionName
    ) -> Task:
        images = SeededBatch(batch, self.image_size, IMAGES_A_CLASS, world)
        return Task(
            network,
            images,
            self.micro_batch,
            build_loss(yaml.safe_load(self.loss)),
            world,
            precision,
        )

    def report_of(self, found: harness.Row) -> harness.Report:
        """Make a report of what rank 0 measured."""
        figures = found["figures"]
        floors = {
            row["contender"]: row for row in figures if row["contender"] in (TWO_PASSES, ONE_PASS)
        }
        title = (
            f"a step of {self.backbone}, {self.image_size} px, B = {self.batch}, micro-batches of"
            f" {self.micro_batch}, {self.loss}, {self.world_size} ranks,"
            f" {'bf16' if self.bf16 else 'float32'}"
        )
        shown = []
        for row in figures:
            seconds = statistics.median(row["seconds"])
            of_row = {
                "median": seconds,
                "lines": row["lines"] or "",
                "least": min(row["seconds"]),
                "rate": self.batch / seconds,
                "mb": harness.over(row["peak_bytes"], 1e6),
                "gflops": row["flops"] / seconds / 1e9,
                "share": row["flops"] / seconds / found["matrix_rate"],
            }
            for name, floor in (("two", TWO_PASSES), ("one", ONE_PASS)):
                for clock in ("seconds", "processor"):
                    of_row[f"{name}_{clock}"] = harness.median_ratio(
                        row[clock], floors[floor][clock]
                    )
            for name, reduces in (("reduces", True), ("others", False)):
                calls = [
                    call for call in row["collectives"] if ("all_reduce" in call["name"]) == reduces
                ]
                of_row[name] = sum(call["calls"] for call in calls)
                of_row[f"{name}_mb"] = sum(call["bytes"] for call in calls) / 1e6
            shown.append(row | of_row)
        tables = [
            harness.table_of(title, SPEED, shown, SPEED_COLUMNS),
            harness.table_of("what it takes", DEMANDS, shown, DEMAND_COLUMNS),
        ]
        if self.memory_batch:
            columns = [
                f"{batch}={{b{batch}:,.0f}}" for batch in sorted({self.batch, *self.memory_batch})
            ]
            rows = [
                {"name": name} | {f"b{batch}": peak / 1e6 for batch, peak in peaks.items()}
                for name, peaks in found["memory"].items()
            ]
            title = "peak memory of a rank by B, MB beside network, optimiser and pixels"
            tables.append(
                harness.table_of(title, "", rows, "|".join(["contender={name}", *columns]))
            )
        errors = ", ".join(
            f"{row['contender']} {row['error']:.0e}" for row in figures if row["error"] is not None
        )
        notes = [f"{name} is left out: {why}" for name, why in found["omitted"].items()]
        notes.append(f"error of the parameters' gradient, relative to {found['exact']}: {errors}")
        for row in figures:
            if row["kept"]:
                notes.append(
                    f"{row['contender']}: {row['kept']} of {self.batch} images keep their graph"
                )
            if row["left_out"]:
                notes.append(
                    f"{row['contender']} did not replay {row['left_out']} images, whose gradient is"
                    " zero"
                )
            if row["stages"]:
                stages = ", ".join(
                    f"{stage} {1000 * spent:.0f}" for stage, spent in row["stages"].items()
                )
                notes.append(f"{row['contender']}, ms of rank 0: {stages}")
        return harness.Report(found, tables, notes)


def contenders_with_savings(
    task: Task, graph: float
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return distap with each saving inside the network, some with graphs kept, and why others are
    left out.
    """
    keep = graphs_kept(task, graph)
    in_bf16 = replace(task, precision="bf16")
    settings: dict[str, tuple[Task, dict[str, Any]]] = {
        "folded": (task, {"change": fold_batchnorm}),
        "folded, kept": (task, {"change": fold_batchnorm, "keep": keep}),
        "channels first": (task, {"change": _channels_first}),
        "in bf16": (in_bf16, {}),
        "in bf16, folded": (in_bf16, {"change": fold_batchnorm}),
        "in bf16, folded, kept": (in_bf16, {"change": fold_batchnorm, "keep": keep}),
    }
    contenders = dict[str, Contender]()
    omitted = dict[str, str]()
    for name, (own_settings, options) in settings.items():
        try:
            contenders[name] = DistapStep(own_settings, **options)
        except DistapError as error:
            omitted[name] = str(error)
    return contenders, omitted


def graphs_kept(task: Task, graph: float) -> int:
    """How many micro-batches have memory to keep their graph, whose bytes an image are `graph`."""
    free = SHARE_OF_FREE * -task.world.maximum(-free_memory(task.world.device))
    return max(0, min(len(task.micro_batches), int(free / (graph * task.micro_batch)) - 1))


def _channels_first(network: RetrievalNetwork) -> None:
    network.memory_format = torch.contiguous_format
    network.to(memory_format=torch.contiguous_format)


def possible_contenders(task: Task, graph: float) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders that there is memory for, and why there is not for the others.

    Args:
        graph: bytes of the graph of an image.
    """
    world = task.world
    free = SHARE_OF_FREE * -world.maximum(-free_memory(world.device))
    chosen: dict[str, Contender] = {
        TWO_PASSES: Floor(task, describes=True),
        ONE_PASS: Floor(task, describes=False),
        "distap": DistapStep(task),
        "Multistage": MultistageLoop(task),
    }
    omitted = {}
    keep = graphs_kept(task, graph)
    if keep:
        chosen[GRAPHS_KEPT] = DistapStep(task, keep)
    else:
        omitted[GRAPHS_KEPT] = f"two graphs take {2 * graph * task.micro_batch / 1e9:.1f} GB"
    pairs = materialised_bytes(task.loss, task.batch.total) or 0
    graphs = graph * len(task.batch.samples)
    cached: dict[str, type[FullBatch]] = {"cached gradients": CachedGradients}
    cached |= {name: loop for name, (package, loop) in PACKAGES.items() if find_spec(package)}
    cached |= {"RS@k's released loop": ReleasedRecallLoop} if world.size == 1 else {}
    if pairs <= free:
        chosen |= {name: loop(task) for name, loop in cached.items()}
    else:
        omitted |= dict.fromkeys(
            cached, f"its loss takes {pairs / 1e9:.1f} GB, for all pairs by autograd"
        )
    whole: dict[str, type[FullBatch]] = {"full batch": FullBatch}
    whole |= {"OML's pipeline": OMLPipeline} if find_spec("oml") and world.size == 1 else {}
    if graphs + pairs <= free:
        chosen |= {name: loop(task) for name, loop in whole.items()}
    else:
        omitted |= dict.fromkeys(
            whole, f"a rank's graph takes {graphs / 1e9:.1f} GB, its loss {pairs / 1e9:.1f} GB"
        )
    return chosen, {
        name: f"{why}; {free / 1e9:.1f} GB may be used" for name, why in omitted.items()
    }
