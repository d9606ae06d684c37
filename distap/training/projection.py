"""Whiten a projection before it trains, or describe its images once for all steps.

A projection begins as the PCA whitening of training images (Revaud et al. 2019). Where it alone
trains, on images that no step varies, its inputs are the same in each step: the images are
described once, and the training reads the descriptors.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from distap.checkpoint.agreement import on_rank_0
from distap.config.evaluation_sections import EvaluationSection
from distap.config.recipe import Recipe
from distap.data.images.augmentation import CropFlipColour
from distap.data.joined import MixedIndex
from distap.data.loading.reader import ImageSet
from distap.data.loading.share import ShareOfBatch, TrainingImages
from distap.data.sampling import MinedSampling
from distap.data.shards.index import Index
from distap.errors import DistapError, logger
from distap.evaluation.describing import describing_of
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import Extraction
from distap.model.network import GivenNetwork, RetrievalNetwork, UnitLinear
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.whitening import learned_whitening
from distap.stopwatch import Stopwatch
from distap.training.build import network_of, send_values
from distap.training.engines import DDPSettings
from distap.world import World

DESCRIBED_FOLDER = "described"  # within the folder of a run: descriptors of its training images


def why_inputs_vary(
    recipe: Recipe, network: RetrievalNetwork, images: TrainingImages
) -> str | None:
    """Return why the training needs its images in each step; None if it can describe them once."""
    data = recipe.data
    model = recipe.model
    index = images.index
    reasons = {
        "the backbone trains": model.freeze != "backbone",
        "the head does not take descriptors of length 1": not isinstance(network.head, UnitLinear),
        "the pooling trains": any(True for _ in network.pooling.parameters()),
        "an adapter trains": model.adapter is not None,
        "image sizes change": bool(data.image_sizes),
        "the images are descriptors already": data.is_described,
        "the weights come with a head": getattr(model.weights, "whole", False),
        "augmentation varies them": data.augmentation != CropFlipColour(crop=1, flip=0),
        "the engine shares parameters out": type(recipe.engine) is not DDPSettings,
        # Descriptors know one level of classes alone.
        "there are coarser classes, or no index": index is None or index.classes.numbers.ndim > 1,
        "there are several data sets": isinstance(index, MixedIndex),
        "mining describes them again": isinstance(recipe.sampling, MinedSampling),
        "the network is an object in Python": isinstance(model.backbone, GivenNetwork),
        "hosts need not share the run's folder": recipe.checkpoint.store is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def described_once(recipe: Recipe, images: TrainingImages, world: World, is_begun: bool) -> Recipe:
    """Describe the training images into the run's folder, unless a run that `is_begun` has done so.

    Returns the recipe that trains on the descriptors.
    """
    data = recipe.data
    folder = recipe.run / DESCRIBED_FOLDER
    if not is_begun:
        bare = {
            "model": recipe.model.model_copy(update={"projection": None}),
            "evaluation": EvaluationSection(),
        }
        plain = recipe.model_copy(update=bare)
        describing = describing_of(plain, network_of(plain, world), world, shown=True)
        assert isinstance(images.index, Index)
        extract_to_folder(Extraction(describing, ImageSet(data.train_source, images.index)), folder)
    described = {"train": f"described:{folder}", "augmentation": CropFlipColour()}
    return recipe.model_copy(update={"data": data.model_copy(update=described)})


def whiten_projection(
    recipe: Recipe,
    network: RetrievalNetwork,
    images: TrainingImages,
    world: World,
    only_check: bool = False,
) -> None:
    """Set the projection to the PCA whitening of its inputs, for the images of the first steps.

    It becomes the same on every rank. The images, augmented as in those steps, at data.image_size,
    are a function of data set and seed. Do nothing unless the recipe asks for it, or if its weights
    are those of a whole network, to which no head is added here. `only_check` describes no image.

    Raises:
        DistapError: the images, or what pooling gives, are too few for so many dimensions.
    """
    layer = network.head
    steps = _whitening_steps(recipe, layer, images)
    if steps == 0 or only_check:
        return
    send_values(network, world)
    network.eval()
    rows = list[Tensor]()
    # A reader of its own on the opened data set: the training's counts steps, and times its waits.
    reader = copy(images)
    reader.stopwatch = Stopwatch()
    reader.rows_of = None
    _, size, transform = images.job.sizes[-1]
    own_sizes = {name: ((0.0, *sizes[-1][1:]),) for name, sizes in images.job.own_sizes.items()}
    reader.job = replace(images.job, sizes=((0.0, size, transform),), own_sizes=own_sizes)
    for share in reader.shares(range(steps)):
        world.note(f"whitening of the images of step {share.step + 1}")
        inputs = _head_inputs(network, share, recipe.replay.size, world)
        present = share.present.to(world.device)
        # In the order of slots, without damaged images: the same rows on any number of ranks.
        order = None if share.order is None else share.order.to(world.device)
        gathered = world.gather_rows(inputs, images.size, order)
        is_there = world.gather_rows(present, images.size, order)
        if world.rank == 0:
            rows.append(gathered[is_there].cpu())

    def learn() -> None:
        inputs = torch.cat(rows).numpy()
        names = np.arange(len(inputs)).astype(str)
        described_by = DescribedBy("", f"crop {recipe.data.image_size}")
        described = DescriptorSet(
            inputs, names, names, described_by, f"model.projection: {recipe.data.train_name}"
        )
        mean, directions = learned_whitening(described, dimensions=recipe.model.projection).tensors
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            # A whitening is W (x - mean) and a linear layer W x + b, so b = -W mean.
            layer.weight.copy_(directions)
            layer.bias.copy_(-directions @ mean)
        logger.info("the projection begins as the whitening of %d images", len(inputs))

    on_rank_0(world, learn)
    for parameter in layer.parameters():
        world.broadcast(parameter.data)


def _whitening_steps(recipe: Recipe, layer: nn.Module, images: TrainingImages) -> int:
    """Return the number of steps whose images a whitening learns from; 0 if none is wanted."""
    model = recipe.model
    dimensions = model.projection
    if dimensions is None and model.whitening:
        raise DistapError(
            "recipe.no_projection",
            f"model.whitening: {model.whitening}: there is no model.projection that it could begin",
        )
    is_whole = getattr(model.weights, "whole", False) and not recipe.data.is_described
    if dimensions is None or not model.whitening or is_whole:
        return 0
    wanted = model.whitening if images.index is None else min(model.whitening, len(images.index))
    steps = -(-wanted // images.size)
    assert isinstance(layer, nn.Linear)
    # n images differ from their mean in n - 1 directions at most.
    limit = min(layer.in_features, steps * images.size - 1)
    if dimensions > limit:
        raise DistapError(
            "descriptors.too_few_to_whiten",
            f"model.projection: {steps * images.size} images of {layer.in_features} features give a"
            f" whitening of at most {limit} dimensions, not {dimensions}; ask for fewer, or begin"
            " with random weights",
        )
    return steps


@torch.no_grad()
def _head_inputs(network: RetrievalNetwork, share: ShareOfBatch, size: int, world: World) -> Tensor:
    """Return (b, F) float64, what the head gets for the images of a share, `size` at once."""
    count = len(share.present)
    blocks = list[Tensor]()
    for start in range(0, count, size):
        images = share.images(slice(start, min(start + size, count))).to(world.device)
        pooled = images if images.ndim == 2 else network.pooled(images)
        blocks.append(normalize(pooled) if isinstance(network.head, UnitLinear) else pooled)
    return torch.cat(blocks).double()
