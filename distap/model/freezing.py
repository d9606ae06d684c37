"""Choose the parameters of a network that training leaves as they are."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import filter as matching
from typing import Any

from timm.models import group_parameters
from torch import nn

from distap.errors import DistapError

OF_BLOCK = re.compile(r"\.\d+\.")  # in names of parameters: stages.2.blocks.0.norm.weight


def freeze(network: nn.Module, chosen: Mapping[Any, int] | Sequence[str]) -> None:
    """Exclude parameters from training: they get no gradient and no moments, and no backward pass runs below them.

    Args:
        network: a RetrievalNetwork.
        chosen: `backbone`; or {"blocks": N}, the first N blocks of a timm network and its stem, or all but the last
            N for -N; or patterns of names, such as backbone.patch_embed.*.
    Raises:
        DistapError: there are no such blocks or names, or nothing is left to train.
    """
    names = [name for name, _ in network.named_parameters()]
    if isinstance(chosen, Mapping):
        frozen = _first_blocks(network.backbone, chosen["blocks"])
    else:
        patterns = ["backbone.*"] if chosen == "backbone" else list(chosen)
        for pattern in patterns:
            if not matching(names, pattern):
                raise DistapError(f"model.freeze: {pattern} fits no parameter; they are {', '.join(names[:4])}, ...")
        frozen = {name for pattern in patterns for name in matching(names, pattern)}
    for name in frozen:
        network.get_parameter(name).requires_grad = False
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise DistapError("model.freeze leaves nothing to train; freeze less, or set model.projection")


def _first_blocks(backbone: Any, count: int) -> set[str]:
    if not hasattr(backbone, "group_matcher"):
        raise DistapError(
            f"model.freeze.blocks: {type(backbone).__name__} is no network of timm, whose blocks are known; give "
            "patterns of names"
        )
    layers = group_parameters(backbone, backbone.group_matcher(coarse=False))  # the stem, then blocks
    # Modules behind the blocks, such as a norm, are in the layer of the last block or in a layer of their own.
    within = {number: [name for name in names if OF_BLOCK.search(name)] for number, names in layers.items() if number}
    blocks = sorted(number for number, names in within.items() if names)
    if not -len(blocks) < count <= len(blocks):
        raise DistapError(f"model.freeze.blocks: {count}, but {type(backbone).__name__} has {len(blocks)} blocks")
    last = max(blocks[:count], default=0)
    frozen = [*layers[0], *(name for number in range(1, last + 1) for name in within[number])]
    return {f"backbone.{name}" for name in frozen}
