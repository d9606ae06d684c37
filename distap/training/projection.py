"""Initialise a projection as a whitening of training images (Revaud et al. 2019: PCA) before the first step."""

import numpy as np
import torch
from torch.nn.functional import normalize

from distap.checkpoint.agreement import on_all
from distap.config.recipe import Recipe
from distap.errors import DistapError, logger
from distap.model.network import RetrievalNetwork, UnitLinear
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.whitening import learn_pca
from distap.stopwatch import Stopwatch
from distap.training.build import images_of
from distap.world import World


def whiten_projection(recipe: Recipe, network: RetrievalNetwork, world: World, only_check: bool = False) -> None:
    """Set the projection to the PCA whitening of its inputs over the first steps' images, on every rank.

    The images, augmented as in those steps, at data.image_size, are a function of data set and seed. Do nothing
    unless the recipe asks for it, or if its weights are those of a whole network, to which no head is added here.
    `only_check` describes no image.

    Raises:
        DistapError: the images, or what pooling gives, are too few for so many dimensions.
    """
    model, dimensions = recipe.model, recipe.model.projection
    is_whole = getattr(model.weights, "whole", False) and not recipe.data.is_described
    if dimensions is None or not model.whitening or is_whole:
        return
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"image_sizes": {}})})
    images = images_of(whole, world, Stopwatch())  # another reader than the training's, which has a state
    wanted = model.whitening if images.index is None else min(model.whitening, len(images.index))
    steps, layer = -(-wanted // images.size), network.head
    assert isinstance(layer, torch.nn.Linear)
    if dimensions > (most := min(layer.in_features, steps * images.size - 1)):
        raise DistapError(
            f"model.projection: {steps * images.size} images of {layer.in_features} features give a whitening of at "
            f"most {most} dimensions, not {dimensions}; ask for fewer, or begin with random weights"
        )
    if only_check:
        return
    network.eval()
    rows, size = list[torch.Tensor](), recipe.loader_chunk
    for share in images.shares(range(steps)):
        world.note(f"whitening of the images of step {share.step + 1}")
        count = len(world.slots(images.size))
        with torch.no_grad():
            given = (share.images(slice(start, min(start + size, count))) for start in range(0, count, size))
            found = [one if one.ndim == 2 else network.pooled(one) for one in (one.to(world.device) for one in given)]
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
        told = DescriptorSet(found, names, names, described_by, f"model.projection: {recipe.data.train}")
        mean, directions = learn_pca(told, dimensions=dimensions).tensors
        with torch.no_grad():
            layer.weight.copy_(directions)
            layer.bias.copy_(-directions @ mean)
        logger.info("the projection begins as the whitening of %d images", len(found))

    on_all(world, learn, mine=world.rank == 0)
    for parameter in layer.parameters():
        world.broadcast(parameter.data)
