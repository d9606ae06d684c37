"""Write the backbone's weights under timm's names, as a file that timm loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

from distap.apps.export.checking import TOLERANCE
from distap.errors import DistapError
from distap.model.network import RetrievalNetwork

UNPOOLED = 'num_classes=0, global_pool=""'


@dataclass(frozen=True)
class BackboneFile:
    """How timm loads the file, and how near its features are."""

    arguments: str  # of timm.create_model, beside name and path
    largest_difference: float  # of the feature maps, relative to the greatest


def save_backbone(
    network: RetrievalNetwork, name: str, path: Path, images: Tensor, about: Mapping[str, str]
) -> BackboneFile:
    """Write the backbone's weights, load them by timm, and raise a DistapError if its features differ.

    Args:
        network: in evaluation mode, on the CPU.
        name: timm's name of the backbone.
        images: (n, 3, height, width) uint8 to compare with.
        about: texts for the file's header.
    """
    # Copies, since the format stores neither memory formats nor tensors that share memory.
    state = {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in network.backbone.state_dict().items()
    }
    path.write_bytes(save(state, {"format": "pt", **about}))
    loaded = _loaded(name, path, global_pool="")
    pixels = (images - network.mean) / network.std
    with torch.inference_mode():
        expected, found = network.backbone(pixels), loaded(pixels)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise DistapError(
            f"{path.name}: timm's {name} with these weights gives other features, by {difference:.2g} of the greatest"
        )
    try:
        _loaded(name, path)
    except DistapError:  # timm's own pooling has weights, which distap's network lacks
        return BackboneFile(UNPOOLED, difference)
    return BackboneFile("num_classes=0", difference)


def _loaded(name: str, path: Path, **options: Any) -> nn.Module:
    try:
        network: nn.Module = timm.create_model(name, num_classes=0, checkpoint_path=str(path), **options)
    except RuntimeError as error:
        raise DistapError(f"{path.name}: timm's {name} does not take these weights: {error}") from error
    return network.eval()
