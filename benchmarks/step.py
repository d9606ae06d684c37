"""Time, memory and communication of a training step: distap, full-batch autograd, cached gradients, and the floor.

All of them train the same network on the same images in the same processes and take turns, so that a noisy machine
is noisy for all. A turn begins with a barrier and lasts as long as its slowest rank. What is compared is the ratio
to the floor in the same round. Beside wall time stands processor time, which other programs disturb less.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from torch import nn

from benchmarks.arithmetic import forward_flops, graph_bytes, matrix_rate, synchronise
from benchmarks.collectives import collectives_of
from benchmarks.contenders import (
    CachedGradients,
    Contender,
    Floor,
    FullBatch,
    SeededBatch,
    Task,
    ThreeStages,
    network_of,
)
from benchmarks.gradients import Recorded, relative_difference
from benchmarks.materialised import materialised_bytes
from benchmarks.peak import peak_bytes
from benchmarks.step_results import Figures, Results, Setting, results_from
from distap import __version__
from distap.engine.precision import Precision
from distap.errors import DistapError
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.sizes import free_memory
from distap.world import World, joined_world

RESULT = "result: "  # what rank 0 prints its figures behind
BACKWARD = 2.0  # the operations of a backward pass over those of a forward pass: gradients by inputs and by weights
SHARE_OF_FREE = 0.8  # of the memory that is free, at most, is given to graphs


def measure(setting: Setting) -> Results | None:
    """Measure in processes of its own, or, started by torchrun, in this one; None on all ranks but the first.

    Raises:
        DistapError: network or weights are unknown, or a process failed.
    """
    if "RANK" in os.environ:
        with joined_world() as world:
            results = measure_here(setting, world)
            return results if world.rank == 0 else None
    command = [sys.executable, "-m", "benchmarks.step", json.dumps(asdict(setting))]
    if setting.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setting.ranks)]
        command[1:2] = [*launcher, "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": str(setting.threads), "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    printed = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not printed:
        raise DistapError(f"the measurement of {setting.backbone} on {setting.ranks} ranks failed; see above")
    return results_from(json.loads(printed[0]))


def measure_here(setting: Setting, world: World) -> Results:
    """What one of the processes does."""
    torch.set_num_threads(setting.threads)
    precision = Precision(setting.precision, world.device.type)
    network = _network(setting).to(world.device)
    task = _task(setting, setting.batch, network, world, precision)
    images = task.images(task.micro_batches[0])
    with precision.autocast():
        forward = forward_flops(network, images)
        graph = graph_bytes(network, images)
    contenders, omitted = possible_contenders(task, graph)
    gradients = {}
    for contender in contenders:
        with Recorded(contender.optimizer) as recorded:
            contender()
        gradients[contender.name] = recorded.gradient
    exact = next((name for name in (FullBatch.name, CachedGradients.name) if name in gradients), "distap")
    errors = {name: relative_difference(gradient, gradients[exact]) for name, gradient in gradients.items()}
    del gradients  # as large as the network, each
    collectives = {contender.name: collectives_of(contender) for contender in contenders}
    seconds, processor, stages = _take_turns(contenders, setting.rounds, world)
    # Last, since it gives back the memory that steps would find again.
    memory = {name: {setting.batch: peak} for name, peak in _peaks(contenders, world).items()}
    rate = world.size * _slowest_matrix_rate(world, precision)
    figures = [
        Figures(
            contender.name,
            seconds[contender.name],
            processor[contender.name],
            memory.get(contender.name, {}).get(setting.batch),
            setting.batch * forward * (contender.forwards + BACKWARD),
            collectives[contender.name],
            errors[contender.name],
            stages.get(contender.name, {}),
            getattr(contender, "left_out", 0),
        )
        for contender in contenders
    ]
    del contenders
    for batch in setting.memory_batches:
        others, _ = possible_contenders(_task(setting, batch, network, world, precision), graph)
        for contender in others:
            contender()  # the first step makes the optimiser's state
        for name, peak in _peaks(others, world).items():
            memory.setdefault(name, {})[batch] = peak
    return Results(
        setting,
        _machine(world),
        rate,
        figures,
        memory,
        exact,
        task.batch.pixels.nbytes / setting.batch,
        4 * int(network.dimensions),  # type: ignore[arg-type]
        omitted,
    )


def _network(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    return network_of(setting.backbone, setting.weights).train()


def _task(setting: Setting, batch: int, network: nn.Module, world: World, precision: Precision) -> Task:
    images = SeededBatch(batch, setting.image_size, setting.images_a_class, world)
    return Task(network, images, setting.micro_batch, QuantizedAP(), world, precision)


def possible_contenders(task: Task, graph: float) -> tuple[list[Contender], dict[str, str]]:
    """Those that there is memory for, and why there is not for the others.

    Args:
        task: what is trained on.
        graph: bytes that the graph of an image takes.
    """
    world, count = task.world, len(task.batch.samples)
    free = SHARE_OF_FREE * -world.maximum(-free_memory(world.device))
    chosen: list[Contender] = [Floor(task, describes=True), Floor(task, describes=False), ThreeStages(task, 0)]
    omitted = {}
    whole = len(task.micro_batches)
    keep = min(whole, int(free / (graph * task.micro_batch)) - 1)
    if keep > 0:
        chosen.append(ThreeStages(task, keep))
    else:
        omitted["distap, graphs kept"] = f"two graphs take {2 * graph * task.micro_batch / 1e9:.1f} GB"
    pairs = materialised_bytes(task.loss, task.batch.total)
    if pairs <= free:
        chosen.append(CachedGradients(task))
    else:
        omitted["cached gradients"] = f"its loss takes {pairs / 1e9:.1f} GB, for all pairs by autograd"
    if graph * count + pairs <= free:
        chosen.append(FullBatch(task))
    else:
        omitted["full batch"] = f"a rank's graph takes {graph * count / 1e9:.1f} GB, its loss {pairs / 1e9:.1f} GB"
    return chosen, {name: f"{why}; {free / 1e9:.1f} GB may be used" for name, why in omitted.items()}


def _peaks(contenders: Sequence[Contender], world: World) -> dict[str, float]:
    """Of the rank that takes most, where that is known."""
    peaks = {contender.name: world.maximum(peak_bytes(contender, world.device)) for contender in contenders}
    return {name: peak for name, peak in peaks.items() if math.isfinite(peak)}


def _take_turns(
    contenders: Sequence[Contender], rounds: int, world: World
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, dict[str, float]]]:
    """Wall and processor seconds by contender and round; and distap's seconds by stage."""
    wall: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    processor: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    own = [contender for contender in contenders if isinstance(contender, ThreeStages)]
    for stages_of in own:
        stages_of.seconds.clear()
    for number in range(rounds):
        # To and fro, so that what changes slowly cancels out.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            world.barrier()
            synchronise(world.device)
            used, started = time.process_time(), time.perf_counter()
            contender()
            synchronise(world.device)
            spent, used = time.perf_counter() - started, time.process_time() - used
            wall[contender.name].append(world.maximum(spent))
            everyone = world.sum(torch.tensor(used, dtype=torch.float64, device=world.device))
            processor[contender.name].append(float(everyone))
    stages = {c.name: {stage: spent / rounds for stage, spent in c.seconds.items()} for c in own}
    return wall, processor, stages


def _slowest_matrix_rate(world: World, precision: Precision) -> float:
    world.barrier()
    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return -world.maximum(-matrix_rate(world.device, dtypes[precision.name]))


def _machine(world: World) -> dict[str, str]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else _processor()
    return {
        "device": device,
        "date": date.today().isoformat(),
        "distap": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure the setting of the command line and print the results as JSON."""
    with joined_world() as world:
        parsed = json.loads(sys.argv[1])
        setting = Setting(**parsed | {"memory_batches": tuple(parsed["memory_batches"])})
        results = measure_here(setting, world)
        if world.rank == 0:
            print(RESULT + json.dumps(asdict(results)))


if __name__ == "__main__":
    main()
