"""Parts of a network that train: adapters of peft, and parameters that are not frozen.

An adapter is a product of two small matrices that is added to a matrix of the backbone, and learns
in its place.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.backbone import timm_config
from distap.model.hollow import tried

IN_PEFT = "base_model.model."  # prefix of names in peft's files
OF_BLOCK = re.compile(r"\.\d+\.")  # in names of parameters: stages.2.blocks.0.norm.weight


@dataclass(frozen=True)
class Adapter:
    """LoRA, or with the name `dora` DoRA, which also learns the length of each row."""

    name: str = "lora"
    rank: PositiveInt = 8
    """Rank of the added matrices. Their product is added unscaled: lora_alpha of peft is rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("qkv", "proj")
    """Last parts of the names of layers to adapt in all blocks, such as qkv, proj, fc1, fc2; or
    whole names."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping an input of an adapter."""
    base: Literal["float32", "bf16"] = "float32"
    """Hold the matrices of the frozen blocks in this dtype; bf16 goes with precision: bf16."""

    def adapt(self, network: Any, image_size: int, seed: int = 0) -> None:
        """Add adapters to layers of a RetrievalNetwork's backbone, and freeze its other parameters.

        The adapters add zero at first. Random numbers are a function of the seed.

        Raises:
            DistapError: peft is missing, or a layer does not exist, cannot be adapted, or is not
                called for an image.
        """
        try:
            import peft
        except ImportError as error:
            raise DistapError(
                "package.missing",
                f"model.adapter: peft is missing: pip install 'distap[adapters]' ({error})",
            ) from error
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,  # the product is added as it is
            lora_dropout=self.dropout,
            target_modules=self._layers(network.backbone),
            use_dora=self.name == "dora",
            base_model_name_or_path=timm_config(network.backbone).get("hf_hub_id"),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(config, network.backbone)
            except ValueError as error:
                raise DistapError(
                    "network.adapter",
                    f"model.adapter: peft cannot adapt {', '.join(self.targets)}: {error}",
                ) from error
        idle = _not_called(network, image_size)
        if idle:
            raise DistapError(
                "network.layer_not_called",
                f"model.adapter.targets: {type(network.backbone).__name__} takes the weights of"
                f" {idle[0]} without calling the layer, so an adapter would learn nothing: name"
                " other layers, such as fc1 and fc2",
            )

    def round_base(self, network: Any, dtype: torch.dtype = torch.float32) -> None:
        """Round matrices of linear layers and convolutions in blocks to `base`, and hold them in
        `dtype`.
        """
        if self.base == "float32":
            return
        for name, module in network.backbone.named_modules():
            in_block = OF_BLOCK.search(f"{name}.") and ".lora_" not in name
            if in_block and isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.data = module.weight.data.to(torch.bfloat16).to(dtype)

    def _layers(self, backbone: nn.Module) -> list[str]:
        layers = [name for name, module in backbone.named_modules() if _takes_adapter(module)]
        # In blocks alone: timm calls a layer of the patch embedding `proj` too.
        in_blocks = [name for name in layers if OF_BLOCK.search(name)]
        chosen = list[str]()
        for target in self.targets:
            fitting = [name for name in in_blocks if name.endswith(f".{target}")]
            if target in layers:
                fitting = [target, *fitting]
            if not fitting:
                endings = dict.fromkeys(name.rpartition(".")[2] for name in in_blocks)
                raise DistapError(
                    "network.unknown_layer",
                    f"model.adapter.targets: {target} fits no layer of a block; they are"
                    f" {', '.join(endings)}",
                )
            chosen += fitting
        return chosen


def _takes_adapter(module: nn.Module) -> bool:
    """Return whether peft can merge an adapter of this layer: not of convolutions in groups."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def merge(network: Any) -> dict[str, Tensor]:
    """Add adapters to the matrices of their layers, and return them by their names in peft's files.

    The layers take their places again and can be trained.
    """
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(network.backbone, save_embedding_layers=False)
    for name, layer in _adapted(network):
        layer.merge()
        network.set_submodule(name, layer.get_base_layer())
    network.backbone.requires_grad_(True)
    return {f"{IN_PEFT}{name}": tensor.detach() for name, tensor in tensors.items()}


def from_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file of peft to those of a RetrievalNetwork with adapters."""
    return {
        re.sub(
            r"(\.lora_[^.]+)(\.weight)?$",
            r"\1.default.weight",
            f"backbone.{name.removeprefix(IN_PEFT)}",
        ): tensor
        for name, tensor in tensors.items()
    }


def _adapted(network: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]


def _not_called(network: nn.Module, image_size: int) -> list[str]:
    network = tried(network)
    layers = _adapted(network)
    called = set[str]()
    trains = network.training
    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, layer in layers
    ]
    device = next(network.parameters()).device
    with torch.no_grad():
        network.eval()(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device))
    network.train(trains)
    for hook in hooks:
        hook.remove()
    return [name for name, _ in layers if name not in called]


def freeze(network: nn.Module, chosen: Mapping[Any, int] | Sequence[str]) -> None:
    """Exclude parameters from training.

    They get no gradient and no moments, and no backward pass runs below them.

    Args:
        network: a RetrievalNetwork.
        chosen: `backbone`; or {"blocks": N}, the first N blocks of a timm network and its stem, or
            all but the last N for -N; or patterns of names, such as backbone.patch_embed.*.
    Raises:
        DistapError: there are no such blocks or names, or nothing is left to train.
    """
    if isinstance(chosen, Mapping):
        frozen = _first_blocks(network.backbone, chosen["blocks"])
    else:
        frozen = _fitting(network, ["backbone.*"] if chosen == "backbone" else chosen)
    for name in frozen:
        network.get_parameter(name).requires_grad = False
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise DistapError(
            "network.nothing_to_train",
            "model.freeze leaves nothing to train; freeze less, or set model.projection",
        )


def _fitting(network: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of the parameters that fit a pattern."""
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not matching(names, pattern):
            raise DistapError(
                "network.pattern_fits_nothing",
                f"model.freeze: {pattern} fits no parameter; they are {', '.join(names[:4])}, ...",
            )
    return {name for pattern in patterns for name in matching(names, pattern)}


def _first_blocks(backbone: Any, count: int) -> set[str]:
    """Return the names of the parameters in the stem and the first `count` blocks."""
    if not hasattr(backbone, "group_matcher"):
        raise DistapError(
            "network.unknown_blocks",
            f"model.freeze.blocks: {type(backbone).__name__} is no network of timm, whose blocks"
            " are known; give patterns of names",
        )
    from timm.models import group_parameters

    # Layer 0 is the stem, the blocks follow. Modules behind them, such as a norm, are in the layer
    # of the last block or in a layer of their own.
    layers = group_parameters(backbone, backbone.group_matcher(coarse=False))
    stem = layers.pop(0, ())
    within = {
        number: [name for name in names if OF_BLOCK.search(name)]
        for number, names in layers.items()
    }
    blocks = sorted(filter(within.get, within))
    if not -len(blocks) < count <= len(blocks):
        raise DistapError(
            "network.too_few_blocks",
            f"model.freeze.blocks: {count}, but {type(backbone).__name__} has {len(blocks)} blocks",
        )
    frozen = [*stem, *chain.from_iterable(within[number] for number in blocks[:count])]
    return {f"backbone.{name}" for name in frozen}
