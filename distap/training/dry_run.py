"""A dry run: prepare a training in this process, draw and rank a first batch, and train nothing."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from distap.config.recipe import Recipe
from distap.data.loading.share import Chunk, TrainingImages
from distap.errors import DistapError
from distap.ranking.loss import Loss
from distap.ranking.rank import rank
from distap.stages.sizes import free_memory
from distap.telemetry.terminal import print_result
from distap.training.announcement import announce
from distap.training.prepared import prepare
from distap.training.rank_memory import NetworkSize, described_peaks
from distap.world import device_of, joined_world

TRIED_IMAGES = 4  # that are read and augmented
# whose random descriptors are ranked
TRIED_CLASSES = 16
TRIED_OF_A_CLASS = 4

Labels = NDArray[np.int64]  # (n,), or (n, L) from the finest level


def dry_run(recipe: Recipe, ranks: int) -> None:
    """Prepare a training by `ranks` ranks of this host, try its first batch, and print its plan."""
    device_of(ranks - 1, recipe.device)  # there may be fewer GPUs
    with joined_world(recipe.timeout_seconds, recipe.device) as world:
        # before the network is there
        room = free_memory(world.device) // (ranks if world.device.type == "cpu" else 1)
        prepared = prepare(recipe, world, planned_ranks=ranks)
        if recipe.checkpoint.store is not None:
            prepared.state.lease.require_writable()
        announce(prepared, None if prepared.is_begun else 0, world.device, ranks)
        images = prepared.images
        dimensions = prepared.network.dimensions
        try_first_batch(recipe, images, dimensions, prepared.step.stages.loss)
        pixels = 3 * recipe.data.image_size**2 * -(-images.size // ranks)
        descriptors = 4 * dimensions * images.size  # of all ranks, which each rank gathers
        peaks = described_peaks(
            NetworkSize.of(prepared.network),
            ranks,
            room,
            in_bf16=recipe.precision == "bf16",
            averages=recipe.ema is not None,
            evaluates=bool(prepared.sets) or prepared.state.nearest is not None,
        )
        print_result(
            f"{'each rank':<10}  {pixels:,} bytes of pixels and {descriptors:,} bytes of"
            " descriptors per step",
            f"{'engines':<10}  peak of a rank for weights, gradients and Adam's moments, if one"
            f" host runs every rank and gives it {room / 1e9:.2f} GB; activations and a loss's"
            " proxies come on top:",
            *peaks,
        )


def try_first_batch(recipe: Recipe, images: TrainingImages, dimensions: int, loss: Loss) -> None:
    """Draw the first batch, augment a few of its images, and rank random descriptors of it.

    Raises:
        DistapError: a part fails, such as a class of the user's own; it names the recipe's key.
    """
    planned = _planned(recipe, images)
    images.job = replace(images.job, workers=0, chunk=TRIED_IMAGES)
    chunk = _first_chunk(recipe, images)
    if planned is None:  # a stream goes on with other images
        samples, labels = np.array(chunk.samples), chunk.labels
    else:
        samples, labels = planned
        if not np.array_equal(_first_chunk(recipe, images).pixels, chunk.pixels):
            raise DistapError(
                "data.augmentation_differs",
                f"data.augmentation: {type(recipe.data.augmentation).__name__} gives other pixels"
                " of the same images when it is called again; draw from torch's generator alone,"
                " which is seeded for each image",
            )
    finest = labels if labels.ndim == 1 else labels[:, 0]
    rows = _rows_to_rank(finest)
    if planned is None and len(np.unique(finest[rows])) == len(rows):
        return  # few images of a stream need not have pairs
    extra = {} if images.rows_of is None else images.rows_of(samples[rows])
    generator = torch.Generator().manual_seed(recipe.seed)
    descriptors = normalize(torch.randn(len(rows), dimensions, generator=generator))
    device = images.world.device
    with blaming("loss", loss):
        ranking = rank(
            descriptors.to(device), torch.from_numpy(labels[rows]).to(device), loss, extra=extra
        )
    if not ranking.is_finite:
        raise DistapError(
            "loss.not_finite",
            f"loss: {type(loss).__name__} or its gradient is not finite for random descriptors; its"
            f" value is {float(ranking.loss):g}",
        )
    moves = any(bool(gradient.any()) for gradient in (ranking.gradient, *ranking.by_parameters))
    if ranking.loss and not moves:
        raise DistapError(
            "loss.no_gradient",
            f"loss: {type(loss).__name__} is {float(ranking.loss):g} for random descriptors, but"
            " its gradient is 0 for all of them, so nothing would be learnt; counts, ranks and"
            " comparisons have none",
        )


def _first_chunk(recipe: Recipe, images: TrainingImages) -> Chunk:
    """Read and augment the first images of the first step."""
    with (
        blaming("data.augmentation", recipe.data.augmentation),
        closing(images.chunks(range(1))) as chunks,
    ):
        return next(chunks)


def _planned(recipe: Recipe, images: TrainingImages) -> tuple[Labels, Labels] | None:
    """Draw the first batch of the plan; return its samples and labels, None without a plan."""
    plan = getattr(images, "plan", None)
    if plan is None:
        return None
    with blaming("sampling", recipe.sampling):
        batch = np.asarray(plan.batch(0))
        again = np.asarray(plan.sampling.batch(plan.classes, plan.seed, 0))
    if batch.shape != (images.size,) or len(np.unique(batch)) < len(batch):
        raise DistapError(
            "sampling.wrong_batch",
            f"sampling: its batch is {batch.shape}; {images.size} different images are expected",
        )
    if batch.dtype.kind not in "iu" or not 0 <= batch.min() <= batch.max() < len(plan.classes):
        raise DistapError(
            "sampling.wrong_batch",
            f"sampling: its batch holds other values than numbers of the {len(plan.classes)}"
            " images",
        )
    if not np.array_equal(again, batch):
        raise DistapError(
            "sampling.batch_differs",
            f"sampling: {type(recipe.sampling).__name__} draws another batch when it is asked again"
            " for the same step; draw from a generator that is seeded by seed and step, or ranks"
            " and restarts would have other batches",
        )
    labels: Labels = plan.classes.numbers[plan.classes.labels_of(batch)]
    return batch, labels


def _rows_to_rank(labels: Labels) -> Labels:
    """Return rows of a few large classes; none if no image has a class, as if all are damaged."""
    classes = [
        np.flatnonzero(labels == label)[:TRIED_OF_A_CLASS]
        for label in np.unique(labels[labels >= 0])
    ]
    largest = sorted(classes, key=len, reverse=True)[:TRIED_CLASSES]
    return np.concatenate([np.empty(0, np.int64), *largest])


@contextmanager
def blaming(key: str, part: Any) -> Iterator[None]:
    """Turn an error of a part's own code into a DistapError that names its key and class."""
    try:
        yield
    except DistapError:
        raise
    except Exception as error:  # a class of the user's own raises anything
        message = shorten(str(error), 200) or type(error).__name__
        raise DistapError(
            "recipe.failing_part",
            f"{key}: {type(part).__name__} fails: {type(error).__name__}: {message}",
        ) from error
