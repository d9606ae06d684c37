"""Measure on this machine what the cost model needs, by real steps of a recipe's network on random
pixels.
"""

import math
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.plan.cards import HOST_MESSAGE_SECONDS, LINK_SHARE, MESSAGE_SECONDS
from benchmarks.plan.network_cost import Line, NetworkCost, changed, without_weights
from benchmarks.plan.step_cost import Machine, NetworkLink, pairs_of
from distap.config.recipe import Recipe
from distap.ranking.gather import gather
from distap.ranking.rank import rank_descriptors
from distap.stages.sizes import free_memory
from distap.stopwatch import Stopwatch
from distap.training.build import learner_of, network_of, step_of
from distap.training.engines import DDPSettings
from distap.training.learner import TrainingStep
from distap.world import World

STAGES = ("describe", "gather", "rank", "replay", "reduce", "optimizer")
# of a rank in a measured step, and those of them that keep their graph
MICRO_BATCHES = 4
KEPT = 2
# for a loss with a parameter for each class, if the recipe does not say how many there are
CLASSES = 2**13


class Trial:
    """A recipe's network, engine and steps on this rank, with random weights and pixels."""

    def __init__(self, recipe: Recipe, batch: int, network: NetworkCost, world: World) -> None:
        self.recipe = without_weights(recipe)
        self._batch = batch
        self._network = network
        self._world = world
        module = network_of(self.recipe, world).train()
        self.learner = learner_of(self.recipe, module, world)
        self._classes = getattr(self.recipe.loss, "classes", None) or CLASSES
        self._loss = self.recipe.loss.sized(self._classes, module.dimensions, self.recipe.seed)
        # Low precision may drift more than trainings tolerate.
        self.recipe = changed(self.recipe, replay={"max_drift": math.inf})

    def step(self, total: int, keep: int = 0) -> tuple[TrainingStep, Any]:
        """Return a step, and a global batch of random pixels with two images a class."""
        recipe = changed(self.recipe, replay={"keep": keep})
        world = self._world
        stopwatch = Stopwatch(world.device)
        samples = torch.tensor(world.slots(total))
        step = step_of(recipe, self.learner, self._loss, world, stopwatch=stopwatch)
        shape = (len(samples), 3, recipe.data.image_size, recipe.data.image_size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        labels = samples // 2 % self._classes
        present = torch.ones(len(samples), dtype=torch.bool)
        return step, SimpleNamespace(
            step=0,
            total=total,
            samples=samples,
            labels=labels,
            present=present,
            images=pixels.__getitem__,
            blank=lambda rows: None,
        )

    def seconds(
        self, steps: Sequence[tuple[TrainingStep, Any]], rounds: int
    ) -> list[dict[str, float]]:
        """Return the median seconds of each step by stage, of the slowest rank.

        Steps take turns.
        """
        taken: list[list[dict[str, float]]] = [[] for _ in steps]
        for _ in range(rounds + 1):  # the first one allocates and compiles, and does not count
            for (step, batch), step_seconds in zip(steps, taken, strict=True):
                self._world.barrier()
                step.stages.stopwatch.seconds.clear()
                step(batch, 0.0)
                step_seconds.append(
                    {
                        stage: self._world.maximum(step.stages.stopwatch.seconds[stage])
                        for stage in STAGES
                    }
                )
        return [
            {
                stage: statistics.median(stage_seconds[stage] for stage_seconds in step_seconds[1:])
                for stage in STAGES
            }
            for step_seconds in taken
        ]

    def machine(self, rounds: int, link: float, gpus_a_host: int) -> Machine:
        """Measure this machine.

        `link` is the bytes a second between hosts, if all ranks are on one.
        """
        world = self._world
        keep = KEPT * self.learner.replica.keeps_graphs
        ranks = self._world.size
        images = MICRO_BATCHES * int(self.recipe.replay.size)  # of a rank
        plain, with_graphs = self.seconds(
            [self.step(max(4, images * ranks), n) for n in (0, keep)], rounds
        )
        forward = with_graph = plain["describe"] / images
        if keep:
            with_graph += (
                (with_graphs["describe"] - plain["describe"]) * MICRO_BATCHES / (KEPT * images)
            )
        inside = between = NetworkLink(link * LINK_SHARE, HOST_MESSAGE_SECONDS)
        if ranks > 1:
            numbers = torch.zeros(min(2**24, self._network.trained), device=world.device)
            seconds = self._timed(partial(world.sum, numbers), rounds)
            inside = NetworkLink(
                2 * (ranks - 1) / ranks * numbers.nbytes / seconds, MESSAGE_SECONDS
            )
        optimizer_share = self._network.trained / (
            1 if type(self.recipe.engine) is DDPSettings else ranks
        )
        return Machine(
            forward=Line(0, forward),
            forward_with_graph=Line(0, with_graph),
            backward=Line(0, max(0.0, plain["replay"] / images - with_graph)),
            rank=Line(0, self._seconds_a_pair(rounds)),
            parameter=plain["optimizer"] / optimizer_share,
            memory=free_memory(world.device),
            inside=inside,
            between=between if ranks == int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) else inside,
            gpus_a_host=gpus_a_host,
        )

    def _seconds_a_pair(self, rounds: int) -> float:
        """Time the ranking of noisy descriptors by one rank."""
        count = min(4096, max(64, self._batch))
        device = self._world.device
        loss = self._loss
        labels = torch.arange(count) // 8 % self._classes
        noise, centres = torch.randn(
            2, count, self._network.dimensions, generator=torch.Generator().manual_seed(0)
        )
        descriptors = normalize(noise + centres[labels])
        present = torch.ones(count, dtype=torch.bool)
        alone = World(device=device)
        gathered = gather(
            descriptors.to(device), labels.to(device), present.to(device), alone, count
        )
        rank = partial(rank_descriptors, loss, gathered)
        return self._timed(rank, rounds) / pairs_of(count, count, loss)

    def _timed(self, action: Callable[[], object], rounds: int) -> float:
        stopwatch = Stopwatch(self._world.device)
        seconds = []
        for _ in range(rounds + 1):
            self._world.barrier()
            with stopwatch.stage("action"):
                action()
            seconds.append(self._world.maximum(stopwatch.seconds.pop("action")))
        return statistics.median(seconds[1:])
