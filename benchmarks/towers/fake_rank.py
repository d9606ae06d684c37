"""Measure the memory of one of W ranks, whose messages a fake process group answers.

The buffers are real, and nothing is sent: `python -m benchmarks.towers.fake_rank JSON`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring import peak_bytes, resident
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.training.learner import Learner
from distap.training.optimizer import TimmOptimizer
from distap.world import World

BLOCKS = 64
WIDTH = 2048  # so large that buffers of other sizes do not count
IMAGES = 4
# A mapping for each tensor, so that none lies where another's memory was freed and goes uncounted.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_MMAP_MAX_": "1000000"}


class Block(nn.Module):
    """A block of a tower, whose weights are all that takes memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.layer(features)


class Tower(nn.Module):
    """Equal blocks, one after another."""

    def __init__(self, width: int, trained: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        for block in self.blocks[: BLOCKS - trained]:
            block.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return features


def recipe_of(engine: dict[str, Any], backbone: str = "test_vit") -> Recipe:
    """Return a recipe of an engine, in the precision that the engine needs."""
    precision = "bf16" if engine.get("gather") == "bf16" else "float32"
    return load_recipe(
        {
            "run": "r",
            "steps": 1,
            "data": {"train": "nowhere", "image_size": 224},
            "sampling": {"name": "random", "batch_size": 8},
            "model": {"backbone": backbone, "weights": "random"},
            "engine": engine,
            "precision": precision,
            "evaluation": {"precision": precision},
        },
        where="benchmarks towers",
    )


def peak_of_a_rank(
    engine: dict[str, Any], ranks: int, trained: int = BLOCKS, width: int = WIDTH
) -> float:
    """Return the peak of a rank in bytes a parameter, in a process of its own.

    Args:
        engine: the recipe's section.
        trained: blocks that train; those before them are frozen.
        width: of a layer, which has its square of parameters.
    """
    asked = json.dumps({"engine": engine, "ranks": ranks, "trained": trained, "width": width})
    done = subprocess.run(
        [sys.executable, "-m", __name__, asked],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | MAPPED | {"OMP_NUM_THREADS": "1"},
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def _measure(engine: dict[str, Any], ranks: int, trained: int, width: int) -> float:
    """Return the bytes that lasts after a step and the rise in the next one, a parameter."""
    recipe = recipe_of(engine)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    world = World(0, ranks, group=dist.group.WORLD, hosts=_hosts(ranks))

    def started(width: int) -> Callable[[], None]:
        """Build a tower, make a step, and return the next one."""
        network = Tower(width, trained)

        def build_optimizer() -> torch.optim.Optimizer:
            parameters = [
                parameter for parameter in network.parameters() if parameter.requires_grad
            ]
            groups = [{"params": parameters, "weight_decay": 0.1}]
            optimizer = TimmOptimizer("adamw").build(groups)
            for group in optimizer.param_groups:
                group["foreach"] = True  # as on a GPU
            return optimizer

        learner = recipe.engine.build(network, build_optimizer, world, None, recipe.precision)
        step = partial(_step, learner, torch.randn(IMAGES, width))
        step()
        return step

    started(width=64)  # libraries are loaded now
    before = resident("VmRSS")
    step = started(width)
    lasting = resident("VmRSS") - before
    return (lasting + peak_bytes(step, torch.device("cpu"))) / (BLOCKS * width**2)


def _step(learner: Learner, images: Tensor) -> None:
    replica = learner.replica
    with replica.describing(), torch.no_grad():
        replica.forward(images)
    with replica.replaying():
        for is_last in (False, True):
            descriptors = replica.forward(images).float()
            replica.backward(descriptors, torch.ones_like(descriptors), is_last)
        replica.reduce()
    learner.update(1e-3)


def _hosts(ranks: int) -> tuple[str, ...]:
    return tuple(f"host{rank // 8}" for rank in range(ranks))


if __name__ == "__main__":
    print(json.dumps(_measure(**json.loads(sys.argv[1]))))
