"""Before the first step: find mistakes in a training's data and network, and prepare its
projection.

The projection begins as a whitening of training images (Revaud et al. 2019: PCA). Where it alone
trains, on images that no step varies, these are described once.
"""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from distap.checkpoint.agreement import on_all
from distap.config.recipe import EvaluationSection, Recipe
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.reader import open_images
from distap.data.loading.share import TrainingImages
from distap.data.sampling import MinedSampling
from distap.errors import DistapError, logger, memory_ran_out
from distap.evaluation.described_images import DescribedImages
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import Extraction
from distap.model.backbone import gives_signed
from distap.model.network import GivenNetwork, RetrievalNetwork, UnitLinear
from distap.model.pooling import GeM
from distap.ranking.loss import Loss
from distap.ranking.rank import rank
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.whitening import learned_whitening
from distap.stopwatch import Stopwatch
from distap.training.build import describing_of, images_of, network_of, sets_of
from distap.training.engines import DDPSettings
from distap.world import World, device_of

DESCRIBED_FOLDER = "described"  # within the folder of a run: descriptors of its training images
# of a dry run: read, and ranked
TRIED_IMAGES = 4
TRIED_CLASSES = 16
TRIED_OF_A_CLASS = 4
OF_DEVICE = re.compile("CUDA|cuDNN|NCCL|HIP")  # in errors that no network is to blame for


def check_start(recipe: Recipe, ranks: int) -> None:
    """Look for mistakes that `ranks` ranks of this host would meet, and a trainer alone would
    not."""
    device_of(ranks - 1, recipe.device)
    checked_data(recipe, World(ranks - 1, ranks), Stopwatch())  # as the last rank: rank 0 warns


def checked_data(
    recipe: Recipe, world: World, stopwatch: Stopwatch
) -> tuple[TrainingImages, dict[str, EvaluationSet]]:
    """Open the images to train on and the sets to evaluate on, by name.

    Raises a DistapError if no batches can be taken from the images, or data.validation shares
    classes with them.
    """
    data = recipe.data
    images = images_of(recipe, world, stopwatch)
    sets = sets_of(recipe)
    if data.is_described and (data.image_sizes or data.augmentation != CropFlipColour()):
        raise DistapError(
            f"{data.train}: descriptors have no pixels: leave data.augmentation and image_sizes out"
        )
    if images.size < world.size:
        raise DistapError(
            f"sampling gives {images.size} images a batch, fewer than the {world.size} ranks: give"
            " larger batches or start fewer ranks"
        )
    validation = sets.get(str(data.validation))
    if validation is not None and validation.truth is not None:
        raise DistapError(
            f"data.validation: {data.validation} has a ground truth: name it in evaluation.also"
        )
    unseen = () if validation is None or not data.unseen_classes else validation.images.sets
    for opened in unseen:
        if images.index is None:
            if world.rank == 0:
                told = "%s has no index, so nothing checks whether it shares classes with %s"
                logger.warning(told, data.train, opened.name)
        elif seen := sorted({*images.index.class_name.tolist()} & {*opened.classes.tolist()}):
            raise DistapError(
                f"data.validation: {opened.name} shares {len(seen)} classes with the training set "
                f"({', '.join(seen[:3])}, ...), so its figures would not be of unseen classes; set "
                "data.unseen_classes=false if that is meant"
            )
    return images, sets


def try_first_batch(recipe: Recipe, images: TrainingImages, dimensions: int, loss: Loss) -> None:
    """Draw the first batch, read and augment a few of its images, and rank random descriptors of
    them.

    Raises a DistapError that names the recipe's key if a part, such as a class of the user's own,
    fails.
    """
    plan = getattr(images, "plan", None)
    labels = None
    if plan is not None:
        with blaming("sampling", recipe.sampling):
            batch = np.asarray(plan.batch(0))
        if batch.shape != (images.size,) or len(np.unique(batch)) < len(batch):
            raise DistapError(
                f"sampling: its batch is {batch.shape}; {images.size} different images are expected"
            )
        if batch.dtype.kind not in "iu" or not 0 <= batch.min() <= batch.max() < len(plan.classes):
            raise DistapError(
                f"sampling: its batch holds other values than numbers of the {len(plan.classes)}"
                " images"
            )
        labels = plan.classes.numbers[plan.classes.labels[batch]]
    images.job = replace(images.job, workers=0, chunk=TRIED_IMAGES)
    with (
        blaming("data.augmentation", recipe.data.augmentation),
        closing(images.chunks(range(1))) as chunks,
    ):
        chunk = next(chunks)
    labels = chunk.labels if labels is None else labels
    finest = labels if labels.ndim == 1 else labels[:, 0]
    known = [
        np.flatnonzero(finest == label)[:TRIED_OF_A_CLASS]
        for label in np.unique(finest[finest >= 0])
    ]
    several = sorted(known, key=len, reverse=True)[:TRIED_CLASSES]
    if len(several) < 2 or len(several[0]) < 2:  # as may be at random: then nothing is ranked
        return
    chosen = np.concatenate(several)
    generator = torch.Generator().manual_seed(recipe.seed)
    descriptors = normalize(torch.randn(len(chosen), dimensions, generator=generator)).to(
        images.world.device
    )
    with blaming("loss", loss):
        ranking = rank(descriptors, torch.from_numpy(labels[chosen]).to(images.world.device), loss)
    if not ranking.is_finite:
        raise DistapError(
            f"loss: {type(loss).__name__} gives {float(ranking.loss):g} for random descriptors"
        )


@contextmanager
def blaming(key: str, part: Any) -> Iterator[None]:
    """Turn an error of a part's own code into a DistapError that names the recipe's key and the
    class.
    """
    try:
        yield
    except DistapError:
        raise
    except Exception as error:  # a class of the user's own raises anything
        told = shorten(str(error), 200) or type(error).__name__
        raise DistapError(
            f"{key}: {type(part).__name__} fails: {type(error).__name__}: {told}"
        ) from error


def checked_network(recipe: Recipe, world: World, weights: Any = None) -> RetrievalNetwork:
    """Build the network (see `network_of`); raise a DistapError if it rejects images of the
    recipe's size.
    """
    network = network_of(recipe, world, weights)

    def try_size(size: int) -> None:
        try:
            with torch.no_grad():
                found = network.eval()(
                    torch.zeros(1, 3, size, size, dtype=torch.uint8, device=world.device)
                )
            if found.shape != (1, network.dimensions):
                raise RuntimeError(
                    f"it gives {tuple(found.shape)} in place of (1, {network.dimensions})"
                )
            if weights is None and recipe.data.is_described:
                DescribedImages(recipe.data.train_source).rows_for(network)
        except DistapError:
            raise
        except Exception as error:  # each architecture raises its own
            if isinstance(error, RuntimeError) and (
                memory_ran_out(error) or OF_DEVICE.search(str(error))
            ):
                raise
            made_for = (getattr(network.backbone, "pretrained_cfg", None) or {}).get("input_size")
            hint = f"; it was made for {made_for[-1]}" if made_for else ""
            raise DistapError(
                f"data.image_size: {recipe.model.architecture} does not take images of {size}"
                f" px{hint} ({shorten(str(error) or type(error).__name__, 200)})"
            ) from error

    for size in sorted({size for _, size in recipe.data.sizes} | {recipe.data.image_size}):
        on_all(world, partial(try_size, size), mine=world.rank == 0)
    if world.rank == 0 and isinstance(network.pooling, GeM) and gives_signed(network.backbone):
        told = (
            "model.pooling: gem takes features below %g for %g, which loses about half of those of"
            " %s; see native"
        )
        logger.warning(told, *[network.pooling.smallest] * 2, recipe.model.architecture)
    return network


def described_once(
    recipe: Recipe, network: RetrievalNetwork, images: TrainingImages, world: World, is_begun: bool
) -> Recipe:
    """Describe the training images into the run's folder, if the projection alone trains and no
    step varies them.

    Return the recipe that trains on the descriptors, or the same recipe if a step needs the images
    themselves.
    """
    data = recipe.data
    model = recipe.model
    folder = recipe.run / DESCRIBED_FOLDER
    if not (
        model.freeze == "backbone"
        and isinstance(network.head, UnitLinear)
        and not any(True for _ in network.pooling.parameters())
        and not (
            model.adapter
            or data.image_sizes
            or data.is_described
            or getattr(model.weights, "whole", False)
        )
        and data.augmentation == CropFlipColour(crop=1, flip=0)
        and type(recipe.engine) is DDPSettings
        and images.index is not None
        and not images.index.class_levels.size  # which descriptors do not know
        and not isinstance(recipe.sampling, MinedSampling)
        and not isinstance(model.backbone, GivenNetwork)
        and recipe.checkpoint.store is None  # with a store, hosts need not share the run's folder
    ):
        return recipe
    if not is_begun:
        bare = {
            "model": model.model_copy(update={"projection": None}),
            "evaluation": EvaluationSection(),
        }
        plain = recipe.model_copy(update=bare)
        how = describing_of(plain, network_of(plain, world), world, shown=True)
        extract_to_folder(Extraction(how, open_images(data.train_source)), folder)
    described = {"train": f"described:{folder}", "augmentation": CropFlipColour()}
    return recipe.model_copy(update={"data": data.model_copy(update=described)})


def whiten_projection(
    recipe: Recipe, network: RetrievalNetwork, world: World, only_check: bool = False
) -> None:
    """Set the projection to the PCA whitening of its inputs over the first steps' images, on every
    rank.

    The images, augmented as in those steps, at data.image_size, are a function of data set and
    seed. Do nothing unless the recipe asks for it, or if its weights are those of a whole network,
    to which no head is added here. `only_check` describes no image.

    Raises:
        DistapError: the images, or what pooling gives, are too few for so many dimensions.
    """
    model = recipe.model
    dimensions = recipe.model.projection
    is_whole = getattr(model.weights, "whole", False) and not recipe.data.is_described
    if dimensions is None and model.whitening:
        raise DistapError(
            f"model.whitening: {model.whitening}: there is no model.projection that it could begin"
        )
    if dimensions is None or not model.whitening or is_whole:
        return
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"image_sizes": {}})})
    # another reader than the training's, which has a state
    images = images_of(whole, world, Stopwatch())
    wanted = model.whitening if images.index is None else min(model.whitening, len(images.index))
    steps = -(-wanted // images.size)
    layer = network.head
    assert isinstance(layer, torch.nn.Linear)
    # n images differ from their mean in n - 1 directions at most.
    if dimensions > (most := min(layer.in_features, steps * images.size - 1)):
        raise DistapError(
            f"model.projection: {steps * images.size} images of {layer.in_features} features give a"
            f" whitening of at most {most} dimensions, not {dimensions}; ask for fewer, or begin"
            " with random weights"
        )
    if only_check:
        return
    network.eval()
    rows = list[torch.Tensor]()
    size = recipe.replay.size
    for share in images.shares(range(steps)):
        world.note(f"whitening of the images of step {share.step + 1}")
        count = len(world.slots(images.size))
        with torch.no_grad():
            given = (
                share.images(slice(start, min(start + size, count)))
                for start in range(0, count, size)
            )
            found = [
                one if one.ndim == 2 else network.pooled(one)
                for one in (one.to(world.device) for one in given)
            ]
            parts = [normalize(one) for one in found] if isinstance(layer, UnitLinear) else found
        present = share.present.to(world.device)
        # In the order of slots, without damaged images: the same rows on any number of ranks.
        gathered = world.gather_rows(torch.cat(parts).double(), images.size)
        is_there = world.gather_rows(present, images.size)
        if world.rank == 0:
            rows.append(gathered[is_there].cpu())

    def learn() -> None:
        found = torch.cat(rows).numpy()
        names = np.arange(len(found)).astype(str)
        described_by = DescribedBy("", f"crop {recipe.data.image_size}")
        told = DescriptorSet(
            found, names, names, described_by, f"model.projection: {recipe.data.train}"
        )
        mean, directions = learned_whitening(told, dimensions=dimensions).tensors
        with torch.no_grad():
            # A whitening is W (x - mean) and a linear layer W x + b, so b = -W mean.
            layer.weight.copy_(directions)
            layer.bias.copy_(-directions @ mean)
        logger.info("the projection begins as the whitening of %d images", len(found))

    on_all(world, learn, mine=world.rank == 0)
    for parameter in layer.parameters():
        world.broadcast(parameter.data)
