"""What can be wrong with a training's data and network, found before the first step and told once."""

import logging
from collections.abc import Callable
from textwrap import shorten
from typing import Any, TypeVar

import torch

from distap.checkpoint.agreement import on_all
from distap.config.recipe import Recipe
from distap.data.loading.training import TrainingImages
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.protocols import refuse_seen_classes
from distap.model.network import RetrievalNetwork
from distap.stages.micro_batches import is_out_of_memory
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.training.build import images_of, network_of
from distap.world import World

T = TypeVar("T")
logger = logging.getLogger("distap")


def first_on_rank_0(world: World, build: Callable[[], T]) -> T:
    """Build on rank 0 and, if that went well, on the others: a mistake is told once, a download asked for once."""
    built: list[T] = []
    on_all(world, lambda: built.append(build()), mine=world.rank == 0)
    return built[0] if built else build()


def checked_images(recipe: Recipe, world: World, stopwatch: Stopwatch) -> TrainingImages:
    """Open the training images; a DistapError if no batches can be taken from them, or evaluation shares classes."""
    data, images = recipe.data, images_of(recipe, world, stopwatch)
    if images.size < world.size:
        raise DistapError(f"sampling gives {images.size} images a batch, fewer than the {world.size} ranks")
    for source in (data.validation_source, parse_source(data.gallery) if data.gallery else None):
        if source is None:
            continue
        validation = load_index(source, data.remote)
        if data.unseen_classes and images.index is not None:
            refuse_seen_classes(images.index, validation, source)
        elif data.unseen_classes and world.rank == 0:
            told = "%s has no index, so nothing checks whether it shares classes with %s"
            logger.warning(told, data.train, source)
    return images


def require_same_data(images: TrainingImages, name: str, world: World) -> None:
    """Raise a DistapError on all ranks unless they see the same data set."""
    if len(set(world.gather_values(images.fingerprint))) > 1:
        own = f"rank {world.rank} has fingerprint {images.fingerprint[:12]}"
        raise DistapError(f"{name}: the ranks see different data; {own}")


def checked_network(recipe: Recipe, world: World, weights: Any = None) -> RetrievalNetwork:
    """Build the network, see `network_of`; a DistapError if it does not take images of the recipe's size."""
    network, size = network_of(recipe, world, weights), recipe.data.image_size

    def try_size() -> None:
        try:
            with torch.no_grad():
                found = network.eval()(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=world.device))
            if found.shape != (1, network.dimensions):
                raise RuntimeError(f"it gives {tuple(found.shape)} in place of (1, {network.dimensions})")
        except DistapError:
            raise
        except Exception as error:  # each architecture raises its own
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            made_for = (getattr(network.backbone, "pretrained_cfg", None) or {}).get("input_size")
            hint = f"; it was made for {made_for[-1]}" if made_for else ""
            raise DistapError(
                f"data.image_size: {recipe.model.architecture} does not take images of {size} px{hint} "
                f"({shorten(str(error) or type(error).__name__, 200)})"
            ) from error

    on_all(world, try_size, mine=world.rank == 0)
    return network
