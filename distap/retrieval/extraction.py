"""Descriptors of a whole data set, each rank describing its share."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from distap.distributed import World
from distap.errors import DistapError


@torch.inference_mode()
def extract(
    network: nn.Module, images: Iterable[tuple[Tensor, Bool[Tensor, " n"]]], world: World, total: int
) -> tuple[Float[Tensor, "N C"], Bool[Tensor, " N"]]:
    """Describe every image in evaluation mode; the network's mode is put back afterwards.

    Args:
        network: images (n, 3, height, width) to descriptors (n, C).
        images: this rank's images, those numbered rank, rank + W, ..., some at a time; and which of them exist.
        world: the ranks.
        total: N, images of all ranks.
    Returns:
        Descriptors of all images in order, and which of them exist; on every rank.
    """
    training = network.training
    network.eval()
    try:
        parts = [(network(pixels.to(world.device)), present.to(world.device)) for pixels, present in images]
    finally:
        network.train(training)
    if not parts:
        raise DistapError(f"rank {world.rank}: no image to describe; there are {total} for {world.size} ranks")
    descriptors, present = (torch.cat(part) for part in zip(*parts, strict=True))
    return world.gather_rows(descriptors, total).clone(), world.gather_rows(present, total).clone()
