"""Training steps of a network without a recipe."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from distap.ranking.loss import Loss
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import ThreeStages
from distap.training.engines import DDPSettings
from distap.training.learner import Learner, TrainingStep
from distap.world import World


def learning(network: nn.Module, optimizer: Optimizer, world: World, **options: Any) -> Learner:
    """Let an optimiser move a network, a whole copy of which is on every rank."""
    return DDPSettings().build(network, lambda: optimizer, world, **options)


def step_with(
    learner: Learner,
    loss: Loss,
    world: World,
    seed: int,
    sizes: MicroBatchSizes,
    *extra_items: Any,
    **options: Any,
) -> TrainingStep:
    return TrainingStep(
        ThreeStages(learner.replica, loss, world, seed, sizes, *extra_items, **options), learner
    )
