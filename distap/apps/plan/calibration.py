"""What this machine gives a recipe's network, measured in a minute, and what steps of it really take.

A process, or each rank that torchrun started, does a few micro-batches, rankings, updates and reductions, which take
turns so that a noisy machine is noisy for all. From their medians come the constants of the cost model.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.arithmetic import synchronise
from benchmarks.contenders import SeededBatch
from distap.apps.plan.inputs import Line, Link, Machine, NetworkFacts, Workload
from distap.apps.plan.recipes import without_weights
from distap.apps.plan.step import pairs_of
from distap.config.recipe import Recipe
from distap.engine import Engine
from distap.model import Describer
from distap.ranking import Gathered, gather, rank_descriptors
from distap.stages.sizes import free_memory
from distap.step import ThreeStageStep
from distap.stopwatch import Stopwatch
from distap.training.build import describer_of, engine_of, fitting_of, network_of, step_of
from distap.world import World

IMAGES_A_CLASS = 8
SMALLEST_RANKED, RANKED = 64, 4096  # images of a ranking that is measured
SMALL = 1024  # float32 numbers of a reduction that is all latency
LARGE = 2**24  # at most, of one that is all bandwidth
STAGES = ("describe", "gather", "rank", "replay", "reduce", "optimizer")


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steps by stage.

    Args:
        slowest: of the rank that took longest.
        quickest: of the one that took least; for `gather` and `reduce` it came last, and waited for nothing but the
            wire.
    """

    slowest: dict[str, float]
    quickest: dict[str, float]

    @property
    def wire(self) -> float:
        """Seconds in which bytes were under way."""
        return self.quickest["gather"] + self.quickest["reduce"]


@dataclass(frozen=True)
class Bench:
    """A recipe's network, its engine and this rank's place, ready to be measured."""

    recipe: Recipe
    workload: Workload
    facts: NetworkFacts
    world: World
    engine: Engine
    describer: Describer | None  # what describes in stage one instead of the engine

    @staticmethod
    def of(recipe: Recipe, workload: Workload, facts: NetworkFacts, world: World) -> "Bench":
        """With an untrained network: what it computes costs the same. Sizes that are `auto` are found."""
        plain = without_weights(recipe)
        network = network_of(plain, world).train()
        describer = describer_of(plain, network)
        engine = engine_of(plain, network, world)
        if workload.replay_size is None:
            workload = replace(workload, replay_size=fitting_of(plain, engine, world, workload.batch).replay_size())
        return Bench(plain, workload, facts, world, engine, describer)

    @property
    def size(self) -> int:
        """Images of a micro-batch to measure with."""
        return max(2, self.workload.replay_size or 2)

    def machine(self, rounds: int, between: Link, gpus_a_host: int) -> Machine:
        """The constants of the cost model, the medians of rounds, of the slowest rank.

        Args:
            rounds: times that each thing is done.
            between: link between hosts, where the ranks are not on several.
            gpus_a_host: of the machines to predict for.
        """
        world, images = self.world, (self.size // 2, self.size)
        ranked = min(RANKED, max(SMALLEST_RANKED, self.workload.batch))
        galleries = [self._gathered(count) for count in (ranked // 4, ranked)]
        tasks: dict[tuple[str, int], Callable[[], float]] = {}
        for count in images:
            tasks["forward", count] = lambda count=count: self._forward(count)  # type: ignore[misc]
            tasks["forward with graph", count] = lambda count=count: self._forward_with_graph(count)  # type: ignore[misc]
            tasks["replay", count] = lambda count=count: self._replay(count)  # type: ignore[misc]
        for gathered in galleries:
            tasks["rank", len(gathered.labels)] = lambda gathered=gathered: self._rank(gathered)  # type: ignore[misc]
        tasks["update", 0] = self._update
        reduced = (SMALL, max(2 * SMALL, min(LARGE, self.facts.trained)))
        if world.size > 1:
            for numbers in reduced:
                tasks["reduce", numbers] = lambda numbers=numbers: self._reduce(numbers)  # type: ignore[misc]
        seconds = self._take_turns(tasks, rounds)
        forward, with_graph, there_and_back = (
            _line(images, [seconds[what, count] for count in images])
            for what in ("forward", "forward with graph", "replay")
        )
        pairs = [pairs_of(len(g.labels), len(g.labels), self.workload.bins is not None) for g in galleries]
        inside = between
        if world.size > 1:
            inside = _link(world.size, reduced, [seconds["reduce", numbers] for numbers in reduced])
        hosts = world.size > int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        own_parameters = self.facts.trained / (world.size if self.workload.sharding.optimizer else 1)
        return Machine(
            forward,
            with_graph,
            Line(there_and_back.once - with_graph.once, there_and_back.each - with_graph.each),
            _line(pairs, [seconds["rank", len(g.labels)] for g in galleries]),
            parameter=seconds["update", 0] / own_parameters,
            memory=free_memory(world.device),
            inside=inside,
            between=inside if hosts else between,
            gpus_a_host=gpus_a_host,
        )

    def steps(self, batch: int, count: int, keep: int = 0) -> "StepSeconds":
        """What real steps on random pixels take, the medians of all but the first.

        Args:
            batch: B.
            count: steps to measure.
            keep: micro-batches that keep their graph.
        """
        step, images = self.step(batch, keep)
        slowest: list[dict[str, float]] = []
        quickest: list[dict[str, float]] = []
        for _ in range(count + 1):
            self.world.barrier()
            step.stopwatch.seconds.clear()
            step(images, 0.0)
            seconds = {stage: step.stopwatch.seconds[stage] for stage in STAGES}
            slowest.append({stage: self.world.maximum(seconds[stage]) for stage in STAGES})
            quickest.append({stage: -self.world.maximum(-seconds[stage]) for stage in STAGES})
        return StepSeconds(_medians(slowest[1:]), _medians(quickest[1:]))

    def step(self, batch: int, keep: int = 0) -> tuple[ThreeStageStep, SeededBatch]:
        """The recipe's step with the sizes of micro-batches that were found, and random pixels for it."""
        replay = self.recipe.replay.model_copy(
            update={"size": self.workload.replay_size, "keep": keep, "max_drift": math.inf}
        )
        describe = self.recipe.describe.model_copy(update={"size": self.workload.describe_size})
        recipe = self.recipe.model_copy(update={"replay": replay, "describe": describe})
        step = step_of(recipe, self.engine, self.world, batch, self.describer, stopwatch=Stopwatch(self.world.device))
        return step, SeededBatch(batch, self.recipe.data.image_size, IMAGES_A_CLASS, self.world)

    def _take_turns(
        self, tasks: dict[tuple[str, int], Callable[[], float]], rounds: int
    ) -> dict[tuple[str, int], float]:
        taken: dict[tuple[str, int], list[float]] = {name: [] for name in tasks}
        for _ in range(rounds + 1):
            for name, task in tasks.items():
                self.world.barrier()
                taken[name].append(self.world.maximum(task()))
        # The first round compiles, allocates and connects.
        return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}

    def _forward(self, count: int) -> float:
        images = self._images(count)
        with self.engine.describing(), torch.no_grad():
            if self.describer is not None:
                self.describer.refresh()
            with self._timed() as seconds:
                (self.describer or self.engine.describe)(images)
        return seconds[0]

    def _forward_with_graph(self, count: int) -> float:
        images = self._images(count)
        with self.engine.accumulating(False), self._timed() as seconds:
            self.engine.forward(images)
        return seconds[0]

    def _replay(self, count: int) -> float:
        """A micro-batch there and back, which reduces nothing where the engine can wait with that."""
        images = self._images(count)
        with self.engine.accumulating(False), self._timed() as seconds:
            self.engine.backward(self.engine.forward(images), self._gradient(count))
        self.engine.discard()
        return seconds[0]

    def _update(self) -> float:
        with self.engine.accumulating(True):
            self.engine.backward(self.engine.forward(self._images(1)), self._gradient(1))
        with self._timed() as seconds:
            self.engine.update(0.0)
        return seconds[0]

    def _rank(self, gathered: Gathered) -> float:
        with self._timed() as seconds:
            rank_descriptors(self.recipe.loss, gathered, "sharded", self.recipe.rank.memory_bytes)
        return seconds[0]

    def _reduce(self, numbers: int) -> float:
        values = torch.zeros(numbers, device=self.world.device)
        with self._timed() as seconds:
            self.world.sum(values)
        return seconds[0]

    def _gathered(self, count: int) -> Gathered:
        """A batch of noisy descriptors that this rank has for itself."""
        alone = World(device=self.world.device)
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(count) // IMAGES_A_CLASS
        noise, centres = (torch.randn(count, self.facts.dimensions, generator=generator) for _ in range(2))
        descriptors = normalize(noise + centres[labels]).to(alone.device)
        present = torch.ones(count, dtype=torch.bool, device=alone.device)
        return gather(descriptors, labels.to(alone.device), present, alone, count)

    def _images(self, count: int) -> Tensor:
        size = self.recipe.data.image_size
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
        return pixels.to(self.world.device)

    def _gradient(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, self.facts.dimensions, generator=generator).to(self.world.device) / count

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        seconds: list[float] = []
        synchronise(self.world.device)
        started = time.perf_counter()
        yield seconds
        synchronise(self.world.device)
        seconds.append(time.perf_counter() - started)


def _medians(seconds: list[dict[str, float]]) -> dict[str, float]:
    return {stage: statistics.median(each[stage] for each in seconds) for stage in STAGES}


def _line(counts: tuple[int, ...] | list[float], seconds: list[float]) -> Line:
    """Through two measurements; where noise would make one of its parts negative, all of it is for each thing."""
    each = (seconds[1] - seconds[0]) / (counts[1] - counts[0])
    once = seconds[1] - each * counts[1]
    return Line(once, each) if once >= 0 and each >= 0 else Line(0.0, seconds[1] / counts[1])


def _link(ranks: int, numbers: tuple[int, int], seconds: list[float]) -> Link:
    """From all-reduces of few and of many float32 numbers."""
    sent = 4 * 2 * (ranks - 1) / ranks * (numbers[1] - numbers[0])
    latency = seconds[0] / (2 * math.ceil(math.log2(ranks)))
    return Link(sent / max(seconds[1] - seconds[0], 1e-9), latency)
