"""Find mistakes in the data and the network of a training before its first step."""

import re
from collections.abc import Mapping
from functools import partial
from textwrap import shorten
from typing import Any

import torch

from distap.checkpoint.agreement import on_rank_0
from distap.config.evaluation_sections import MERGED
from distap.config.recipe import Recipe
from distap.data.images.augmentation import CropFlipColour
from distap.data.joined import MixedImages, MixedIndex, shared_images
from distap.data.loading.indexed import IndexedImages
from distap.data.loading.share import TrainingImages
from distap.data.mixing import Mixture
from distap.errors import DistapError, logger, memory_ran_out
from distap.evaluation.described_images import DescribedTraining
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.several_sets import merged_figure_names, with_mean
from distap.evaluation.stored_rows import StoredRows
from distap.model.backbone import gives_signed
from distap.model.network import RetrievalNetwork
from distap.model.pooling import GeM
from distap.stopwatch import Stopwatch
from distap.training.build import images_of, network_of, sets_of
from distap.training.engines import FSDPSettings
from distap.world import World

MOST_COMPARED = 10_000_000  # images that are compared with those of other sets: some seconds
OF_DEVICE = re.compile("CUDA|cuDNN|NCCL|HIP")  # in errors that no network is to blame for


def open_data(
    recipe: Recipe, world: World, stopwatch: Stopwatch
) -> tuple[TrainingImages, dict[str, EvaluationSet]]:
    """Open the images to train on and the sets to evaluate on, by name.

    Raises:
        DistapError: no batches can be taken from the images for the ranks of `world`, or
            data.validation shares classes with them, or evaluation.best names no figure.
    """
    data = recipe.data
    images = images_of(recipe, world, stopwatch)
    sets = sets_of(recipe)
    if data.is_described and (data.image_sizes or data.augmentation != CropFlipColour()):
        raise DistapError(
            "data.no_pixels",
            f"{data.train_name}: descriptors have no pixels: leave data.augmentation and"
            " image_sizes out",
        )
    if images.size < world.size:
        raise DistapError(
            "sampling.too_small",
            f"sampling gives {images.size} images a batch, fewer than the {world.size} ranks: give"
            " larger batches or start fewer ranks",
        )
    for name in data.validation_sets if sets else ():
        validation = sets[name]
        if validation.truth is not None:
            raise DistapError(
                "recipe.misplaced_truth",
                f"data.validation: {name} has a ground truth: name it in evaluation.also",
            )
        if data.unseen_classes:
            _refuse_seen_classes(recipe, images, name, validation, warns=world.rank == 0)
    if sets:
        _require_best(recipe, sets)
    return images, sets


def evaluated_figures(
    recipe: Recipe, sets: Mapping[str, EvaluationSet]
) -> dict[str, dict[str, float]]:
    """Return 0 for each figure of an evaluation, by set, MEAN and MERGED too."""
    figures = {name: opened.figure_names for name, opened in sets.items()}
    if recipe.evaluation.merged:
        figures[MERGED] = merged_figure_names(sets)
    return with_mean({name: dict.fromkeys(names, 0.0) for name, names in figures.items()})


def _require_best(recipe: Recipe, sets: dict[str, EvaluationSet]) -> None:
    """Raise a DistapError if no evaluation gives the figure that chooses the best checkpoint."""
    expected = evaluated_figures(recipe, sets)
    best = recipe.best
    if best.figure not in expected.get(str(best.set), ()):
        names = "; ".join(f"{name}: {', '.join(values)}" for name, values in expected.items())
        raise DistapError(
            "evaluation.unknown_figure",
            f"evaluation.best: no evaluation gives the figure {best.figure!r} of {best.set};"
            f" expected a set and a figure of {names}",
        )


def _refuse_seen_classes(
    recipe: Recipe, images: TrainingImages, name: str, validation: EvaluationSet, warns: bool
) -> None:
    """Raise a DistapError if a validation set shares a class with the training images.

    A named set is compared with the one to train on of its name alone, if there are several, since
    sets may use the same names for other classes.
    """
    index = images.index
    if isinstance(index, MixedIndex) and isinstance(recipe.data.validation, Mapping):
        if name not in index.sets:
            return
        index = index.sets[name]
    for opened in validation.images.sets:
        if index is None:
            if warns:
                logger.warning(
                    "%s has no index, so nothing checks whether it shares classes with %s",
                    recipe.data.train_name,
                    opened.name,
                )
            continue
        shared = sorted({*index.class_name.tolist()} & {*opened.classes.tolist()})
        if shared:
            names = ", ".join(shared[:3]) + (", ..." if len(shared) > 3 else "")
            key = "data.validation"
            if isinstance(recipe.data.validation, Mapping):
                key = f"{key}.{name}"
            raise DistapError(
                "data.seen_classes",
                f"{key}: {opened.name} shares {len(shared)} classes with the training set"
                f" ({names}), so its figures would not be of unseen classes; set"
                " data.unseen_classes=false if that is meant",
            )


def check_sets(recipe: Recipe, images: TrainingImages, steps: int) -> None:
    """Refuse or warn of what does not fit in a training on several data sets.

    Raises:
        DistapError: a set that may not repeat would give more images than it holds.
    """
    if not isinstance(images, IndexedImages) or not isinstance(images.read_from, MixedImages):
        return
    mixture = images.plan.sampling
    assert isinstance(mixture, Mixture)
    indexes = images.read_from.index.sets
    taken = mixture.images_before(steps, recipe.seed).tolist()
    for (name, index), count in zip(indexes.items(), taken, strict=True):
        logger.info(
            "%-10s  %s: %s images of %s classes, of which the training takes %s, %.3g epochs",
            "set",
            name,
            f"{len(index):,}",
            f"{len(index.class_name):,}",
            f"{count:,}",
            count / len(index),
        )
        if len(index.classes.with_pairs) < 2:
            logger.warning(
                "data.train.%s: %d of its classes have two images or more, so a query has no"
                " positives, or no negatives, in its own set",
                name,
                len(index.classes.with_pairs),
            )
        if not recipe.data.train_sets[name].repeat and count > len(index):
            raise DistapError(
                "data.repeated_set",
                f"data.train.{name}: the training takes {count:,} images of it, but it holds"
                f" {len(index):,} and its repeat is false: train fewer steps, lower its weight, or"
                " set repeat to true",
            )
    _warn_of_shared_images(images.read_from)


def _warn_of_shared_images(images: MixedImages) -> None:
    if len(images.index) > MOST_COMPARED:
        logger.info("the data sets are too large to look for images that two of them share")
        return
    for name, other, shared in shared_images(dict(zip(images.names, images.sets, strict=True))):
        logger.warning(
            "data.train: %s and %s share %s images, by their names or their sizes and CRC-32,"
            " which are negatives of each other where a batch holds both: leave them out of one"
            " set",
            name,
            other,
            f"{shared:,}",
        )


def open_rows(recipe: Recipe, world: World) -> StoredRows | None:
    """Open the rows that the loss takes of each image; every rank calls it.

    Raises:
        DistapError: the loss takes other rows than data.rows names, or these cannot be used.
    """
    sets = recipe.data.train_sets
    named = recipe.data.row_names
    taken = recipe.loss.extras
    # First, since a name that is misspelt lacks as well.
    unused = [name for name in named if name not in taken]
    if unused:
        raise DistapError(
            "loss.unused_rows",
            f"data.rows: {', '.join(unused)}: the loss takes the rows"
            f" {', '.join(taken) or 'of no name'}: leave these out, or choose a loss that takes"
            " them",
        )
    lacking = [name for name in taken if name not in named]
    if lacking:
        raise DistapError(
            "loss.needs_extra",
            f"loss: it takes the rows {', '.join(lacking)} of each image: name a folder of `distap"
            f" extract` in data.rows, such as data.rows: {{{lacking[0]}: FOLDER}}; with several"
            " data sets, in `rows` of each",
        )
    if not named:
        return None
    folders = {
        name: {
            f"data.train.{of_set}.rows.{name}" if of_set else f"data.rows.{name}": settings.rows[
                name
            ]
            for of_set, settings in sets.items()
        }
        for name in named
    }
    return StoredRows(folders, recipe.data.cache, world)


def join_rows(images: TrainingImages, rows: StoredRows | None) -> None:
    """Let the images' shares have the rows of their images."""
    if rows is not None:
        assert isinstance(images, IndexedImages)
        images.rows_of = rows.joined(images.read_from)


def checked_network(
    recipe: Recipe, world: World, images: TrainingImages | None = None, weights: Any = None
) -> RetrievalNetwork:
    """Build the network (see `network_of`) and check that it takes the recipe's images.

    Raises:
        DistapError: it rejects images of this size, or did not describe the descriptors to train
            on.
    """
    # An engine that shares parameters out sends each rank its shards alone.
    whole = world.size == 1 or not isinstance(recipe.engine, FSDPSettings)
    network = network_of(recipe, world, weights, whole)
    described = images.described if isinstance(images, DescribedTraining) else []

    def try_size(size: int) -> None:
        _describe_black(recipe, network, size, world)
        for of_set in described if weights is None else []:
            of_set.rows_for(network)

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
