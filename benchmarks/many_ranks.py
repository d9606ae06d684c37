"""What W ranks cost: a step of real ones on this machine, and the part of one rank of many that are
not there.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import normalize

from benchmarks.contenders import IMAGES_A_CLASS, DistapStep, SeededBatch, Task, seeded_network
from benchmarks.measuring import peak_bytes, private_bytes
from distap.ranking.gather import LEAST_SENT, MOST_CHUNKS, Gathering
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank_descriptors
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.truth import class_truth
from distap.world import CPU, Arrival, World

BACKBONE = "test_resnet"
IMAGE_SIZE = 32
MICRO_BATCH = 8
ROUNDS = 5
# a label, the number of the image and whether it takes part travel with each descriptor
FACTS_BYTES = 3 * 8
BUDGET = 2**28  # bytes of ranking beside the descriptors
# float32 values of each descriptor, of positives and of negatives
BIN_SLOPES = 2 * (QuantizedAP().centres - 1)
ROUNDS_OF_STORE = 5


def step_of(world: World, batch: int) -> dict[str, Any]:
    """Median seconds of each stage of the step of a tiny network, on this rank."""
    network = seeded_network(BACKBONE, "random").to(world.device)
    shared = SeededBatch(batch, IMAGE_SIZE, IMAGES_A_CLASS, world)
    step = DistapStep(Task(network, shared, MICRO_BATCH, QuantizedAP(), world))
    for _ in range(1 + ROUNDS):
        world.barrier()
        step()
    stages = {
        name: statistics.median(stage_seconds.get(name, 0.0) for stage_seconds in step.seconds[1:])
        for name in step.seconds[-1]
    }
    return {"ranks": world.size, "stages": stages, "private_mb": private_bytes() / 1e6}


@dataclass(frozen=True)
class OneOfMany(World):
    """One rank of W whose collectives return at once: a gather brings given rows, a sum what this
    rank has.
    """

    # of all ranks in slot order, as they travel
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    taken: list[int] = field(default_factory=lambda: [0])

    def start_gather(self, rows: Tensor) -> Arrival:
        first = self.taken[0]
        self.taken[0] += self.size * len(rows)
        return Arrival(self, rows, self.rows[first : self.taken[0]].clone())

    def gather_rows(self, rows: Tensor, total: int, order: Tensor | None = None) -> Tensor:
        return rows.repeat(-(-total // len(rows)), *[1] * (rows.ndim - 1))[:total]

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def maximum(self, value: float) -> float:
        return value


def stage_two_of(ranks: int, batch: int, dimensions: int) -> dict[str, Any]:
    """Seconds and peak memory of stage two of one of W ranks, beside the other ranks' rows that are
    given.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(batch) // IMAGES_A_CLASS
    descriptors = normalize(torch.randn(batch, dimensions, generator=generator))
    facts = torch.stack([labels, torch.arange(batch), torch.ones_like(labels)], dim=1).view(
        torch.float32
    )
    world = OneOfMany(0, ranks, rows=torch.cat([facts, descriptors], dim=1))
    own_rows = slice(0, None, ranks)
    own_descriptors = descriptors[own_rows].clone()
    of_mine = labels[own_rows].clone()
    del descriptors, facts

    def rank() -> None:
        world.taken[0] = 0
        gathering = Gathering(world, batch)
        gathering.add(
            own_descriptors,
            of_mine,
            torch.ones_like(of_mine, dtype=torch.bool),
            torch.full_like(of_mine, -1),
        )
        rank_descriptors(QuantizedAP(), gathering.finish(), "sharded", BUDGET)

    rank()  # compiles
    seconds: list[float] = []
    peak = peak_bytes(lambda: seconds.append(_seconds(rank)), CPU)
    return {
        "batch": batch,
        "ranks": ranks,
        "seconds": seconds[0],
        "peak_mb": peak / 1e6,
        "formula_mb": stage_two_bytes(ranks, batch, dimensions) / 1e6,
        "gathered_mb": batch * (4 * dimensions + FACTS_BYTES) / 1e6,
    }


def stage_two_bytes(ranks: int, batch: int, dimensions: int) -> float:
    """Bytes that stage two of a rank takes beside pixels and network, with float32 descriptors.

    The gallery and its facts, and a copy by class; a chunk on its way, as it comes, in slot order,
    and what takes part of it; the slopes of all descriptors, likewise, and as a table; ten integers
    an image; and the budget.
    """
    row = 4 * dimensions + FACTS_BYTES
    chunk = batch / min(MOST_CHUNKS, max(batch // ranks // LEAST_SENT, 1))
    of_images = (row + 4 * dimensions) + 3 * 4 * BIN_SLOPES + 10 * 8
    return batch * of_images + 3 * chunk * row + BUDGET


def evaluation_of(ranks: int, images: int, dimensions: int) -> dict[str, Any]:
    """Seconds of one of W ranks that share the ranking of all pairs of N images."""
    generator = torch.Generator().manual_seed(0)
    descriptors = normalize(torch.randn(images, dimensions, generator=generator))
    truth = class_truth(torch.arange(images) // IMAGES_A_CLASS)
    figures = LABELLED_FIGURES
    world = OneOfMany(0, ranks)
    seconds = _seconds(
        lambda: evaluate_descriptors(descriptors, descriptors, truth, figures, world=world)
    )
    return {"ranks": ranks, "images": images, "seconds": seconds}


def store_of(ranks: int) -> dict[str, Any]:
    """Milliseconds of the requests to a real store: a heartbeat of all of W ranks, and a case that
    one rank reads.

    One process sends the requests of all, one after another.
    """
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    keys = [f"beat/{rank}" for rank in range(ranks)]
    rounds = []
    cases = []
    for number in range(1 + ROUNDS_OF_STORE):
        doing = {"activity": "gather", "seconds": 1.0, "waiting": ["all_gather"]}
        state = json.dumps({"time": time.time(), "begun": {"": number}, **doing})

        def beat(state: str = state) -> None:
            for key in keys:
                store.set(key, state)
                store.check(["verdict"])

        rounds.append(_seconds(beat))
        cases.append(_seconds(lambda: [json.loads(text) for text in store.multi_get(keys)]))
    milliseconds = (1e3 * statistics.median(times[1:]) for times in (rounds, cases))
    return {"ranks": ranks} | dict(zip(("round_ms", "case_ms"), milliseconds, strict=True))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
