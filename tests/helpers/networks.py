"""Networks without pretrained weights, and images for them."""

import torch
from torch import Tensor

from distap.model.backbone import TimmBackbone
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import GeMPooling
from distap.model.weights import RandomWeights


def random_network(
    backbone="resnet10t", projection=None, seed=0, pooling=None, **options
) -> RetrievalNetwork:
    """The same network every time; GeM unless `pooling` says otherwise."""
    torch.manual_seed(seed)
    return build_network(
        TimmBackbone(backbone), RandomWeights(), pooling or GeMPooling(), projection, **options
    )


def noise(count=2, height=64, width=None, seed=0) -> Tensor:
    """Images (count, 3, height, width) of uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (count, 3, height, width or height), dtype=torch.uint8, generator=generator
    )
