"""Find mistakes in the data and the network of a training before its first step."""

import re
from functools import partial
from textwrap import shorten
from typing import Any

import torch

from distap.checkpoint.agreement import on_rank_0
from distap.config.recipe import Recipe
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.share import TrainingImages
from distap.errors import DistapError, logger, memory_ran_out
from distap.evaluation.described_images import DescribedTraining
from distap.evaluation.evaluation_set import EvaluationSet
from distap.model.backbone import gives_signed
from distap.model.network import RetrievalNetwork
from distap.model.pooling import GeM
from distap.stopwatch import Stopwatch
from distap.training.build import images_of, network_of, sets_of
from distap.world import World

OF_DEVICE = re.compile("CUDA|cuDNN|NCCL|HIP")  # in errors that no network is to blame for


def open_data(
    recipe: Recipe, world: World, stopwatch: Stopwatch
) -> tuple[TrainingImages, dict[str, EvaluationSet]]:
    """Open the images to train on and the sets to evaluate on, by name.

    Raises:
        DistapError: no batches can be taken from the images for the ranks of `world`, or
            data.validation shares classes with them.
    """
    data = recipe.data
    images = images_of(recipe, world, stopwatch)
    sets = sets_of(recipe)
    if data.is_described and (data.image_sizes or data.augmentation != CropFlipColour()):
        raise DistapError(
            "data.no_pixels",
            f"{data.train}: descriptors have no pixels: leave data.augmentation and image_sizes"
            " out",
        )
    if images.size < world.size:
        raise DistapError(
            "sampling.too_small",
            f"sampling gives {images.size} images a batch, fewer than the {world.size} ranks: give"
            " larger batches or start fewer ranks",
        )
    validation = sets.get(str(data.validation))
    if validation is not None and validation.truth is not None:
        raise DistapError(
            "recipe.misplaced_truth",
            f"data.validation: {data.validation} has a ground truth: name it in evaluation.also",
        )
    if validation is not None and data.unseen_classes:
        _refuse_seen_classes(recipe, images, validation, warns=world.rank == 0)
    return images, sets


def _refuse_seen_classes(
    recipe: Recipe, images: TrainingImages, validation: EvaluationSet, warns: bool
) -> None:
    """Raise a DistapError if the validation set shares a class with the training images."""
    for opened in validation.images.sets:
        if images.index is None:
            if warns:
                logger.warning(
                    "%s has no index, so nothing checks whether it shares classes with %s",
                    recipe.data.train,
                    opened.name,
                )
            continue
        shared = sorted({*images.index.class_name.tolist()} & {*opened.classes.tolist()})
        if shared:
            raise DistapError(
                "data.seen_classes",
                f"data.validation: {opened.name} shares {len(shared)} classes with the training"
                f" set ({', '.join(shared[:3])}, ...), so its figures would not be of unseen"
                " classes; set data.unseen_classes=false if that is meant",
            )


def checked_network(
    recipe: Recipe, world: World, images: TrainingImages | None = None, weights: Any = None
) -> RetrievalNetwork:
    """Build the network (see `network_of`) and check that it takes the recipe's images.

    Raises:
        DistapError: it rejects images of this size, or did not describe the descriptors to train
            on.
    """
    network = network_of(recipe, world, weights)
    described = images.described if isinstance(images, DescribedTraining) else None

    def try_size(size: int) -> None:
        _describe_black(recipe, network, size, world)
        if described is not None and weights is None:
            described.rows_for(network)

    for size in sorted({size for _, size in recipe.data.sizes} | {recipe.data.image_size}):
        on_rank_0(world, partial(try_size, size))
    if world.rank == 0 and isinstance(network.pooling, GeM) and gives_signed(network.backbone):
        smallest = network.pooling.smallest
        logger.warning(
            "model.pooling: gem takes features below %g for %g, which loses about half of those of"
            " %s; see native",
            smallest,
            smallest,
            recipe.model.architecture,
        )
    return network


def _describe_black(recipe: Recipe, network: RetrievalNetwork, size: int, world: World) -> None:
    """Describe a black image of `size` x `size` pixels; raise a DistapError if that fails."""
    black = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=world.device)
    expected = (1, network.dimensions)
    try:
        with torch.no_grad():
            descriptors = network.eval()(black)
        if descriptors.shape != expected:
            raise RuntimeError(f"it gives {tuple(descriptors.shape)} in place of {expected}")
    except DistapError:
        raise
    except Exception as error:  # each architecture raises its own
        is_of_device = memory_ran_out(error) or OF_DEVICE.search(str(error))
        if isinstance(error, RuntimeError) and is_of_device:
            raise
        made_for = (getattr(network.backbone, "pretrained_cfg", None) or {}).get("input_size")
        hint = f"; it was made for {made_for[-1]}" if made_for else ""
        raise DistapError(
            "network.wrong_image_size",
            f"data.image_size: {recipe.model.architecture} does not take images of {size} px{hint}"
            f" ({shorten(str(error) or type(error).__name__, 200)})",
        ) from error
