"""What a recipe asks, in the words of the cost model."""

from typing import Any

import torch

from distap.apps.plan.counting import count
from distap.apps.plan.inputs import NetworkFacts, Sharding, Workload
from distap.config.recipe import Recipe
from distap.config.sections import RandomWeights
from distap.model import RetrievalNetwork, activation_checkpointing
from distap.ranking import Loss, WeightedSum
from distap.ranking.losses.quantized import SoftBinnedAP
from distap.training.build import network_of
from distap.world import World


def facts_of(recipe: Recipe) -> NetworkFacts:
    """The recipe's network, counted; none of its weights are read."""
    plain = without_weights(recipe)
    meta = World(device=torch.device("meta"))

    def build() -> RetrievalNetwork:
        network = network_of(plain, meta)
        if recipe.step.activation_checkpointing:
            activation_checkpointing(network)
        return network

    return count(build, recipe.data.image_size, recipe.precision)


def without_weights(recipe: Recipe) -> Recipe:
    """The recipe with a network that has not learnt anything and is not compiled."""
    model = recipe.model.model_copy(update={"weights": RandomWeights()})
    step = recipe.step.model_copy(update={"compile": False})
    return recipe.model_copy(update={"model": model, "step": step})


def workload_of(recipe: Recipe) -> Workload:
    """The recipe's training, as far as its costs go."""
    replay, describe, keep = recipe.replay.size, recipe.describe.size, recipe.replay.keep
    sharding = sharding_of(recipe.engine)
    return Workload(
        batch=recipe.sampling.size,
        steps=recipe.steps,
        replay_size=None if replay == "auto" else replay,
        describe_size=None if describe == "auto" else describe,
        keep=None if keep == "auto" else keep,
        bins=_bins(recipe.loss),
        remembered=recipe.memory.size,
        ranking_memory=recipe.rank.memory_bytes,
        central=recipe.rank.mode == "central",
        gathers_early=recipe.rank.overlap,
        # DeepSpeed updates a copy of the parameters of its own.
        optimizer_states=3 if sharding.name.startswith("deepspeed") else 2,
        sharding=sharding,
    )


def sharding_of(engine: Any) -> Sharding:
    """What an engine with these settings divides among the ranks."""
    if engine.name == "fsdp":
        by_block = engine.reshard if engine.units is None else engine.units == "blocks"
        return Sharding(
            "fsdp",
            weights=True,
            gradients=True,
            optimizer=True,
            gathers=2 if engine.reshard else 0,  # for the forward pass, and for the backward pass
            reduces_often=engine.reshard,
            hides_reduction=by_block,
        )
    if engine.name == "deepspeed":
        stage = engine.stage
        # Whatever the stage, gradients are summed whole on each rank and reduced once.
        # Weights stay from the forward to the backward pass, up to the thousand millions that DeepSpeed lets live.
        return Sharding(
            f"deepspeed, stage {stage}",
            weights=stage == 3,
            gradients=True,
            optimizer=True,
            gathers=1 if stage == 3 else 0,
            unit=1.0,
        )
    return Sharding("ddp", hides_reduction=engine.bucket_megabytes is not None)


def _bins(loss: Loss) -> int | None:
    """Bins of a loss by histogram, or of a sum of them; None where a loss needs whole rows of similarities."""
    bins = 0
    for term in [term for _, term in loss.terms] if isinstance(loss, WeightedSum) else [loss]:
        if not isinstance(term, SoftBinnedAP):
            return None
        bins += term.histogram().bins
    return bins
