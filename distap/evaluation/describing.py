"""Build what describes images from a recipe."""

from collections.abc import Sequence
from pathlib import Path

from distap.config.recipe import NetworkRecipe, Recipe
from distap.data.sizing import Sizing
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.network import RetrievalNetwork
from distap.retrieval.whitening import load_whitening
from distap.world import World


def describing_of(
    recipe: NetworkRecipe,
    network: RetrievalNetwork,
    world: World,
    sizing: str | None = None,
    scales: Sequence[float] | None = None,
    *,
    whitening: str | Path | None = None,
    shown: bool = False,
) -> Describing:
    """Return how evaluations describe images with an unsharded network.

    Args:
        sizing, scales: as in `distap.load`; None takes those of the recipe.
        whitening: a file of `distap whiten`.
        shown: show a progress bar.
    """
    data = recipe.data
    evaluation = recipe.evaluation
    describer = ImageDescriber(
        network,
        Sizing.parse(sizing or recipe.sizing),
        scales or evaluation.scales,
        whitening=None if whitening is None else load_whitening(Path(whitening)),
        antialias=evaluation.antialias,
        precision=evaluation.precision,
        first=evaluation.dimensions,
        batch_pixels=evaluation.batch_size * data.image_size**2,
    )
    return Describing(describer, world, data.workers, data.requests, shown)


def describing_of_set(
    recipe: Recipe, name: str, network: RetrievalNetwork, world: World
) -> Describing:
    """Return how an evaluation describes the images of the set `name` of `sets_of`."""
    section = recipe.evaluation.also.get(name, recipe.evaluation)
    return describing_of(recipe, network, world, section.sizing, section.scales)
