"""Adapters of peft: a product of two small matrices is added to those of a backbone, and learns in their place."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import nn

from distap.errors import DistapError
from distap.model.freezing import OF_BLOCK


@dataclass(frozen=True)
class Adapter:
    """LoRA, or with the name `dora` DoRA, which also learns the length of each row."""

    name: str = "lora"
    rank: PositiveInt = 8
    """Rank of the added matrices."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("qkv", "proj")
    """Last parts of the names of layers to adapt in all blocks, such as qkv, proj, fc1, fc2; or whole names."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping an input of an adapter."""

    def adapt(self, network: Any, image_size: int, seed: int = 0) -> None:
        """Add adapters to layers of a RetrievalNetwork's backbone, and freeze the rest of the backbone.

        They add zero at first. Random numbers are a function of the seed.

        Raises:
            DistapError: peft is missing, or a layer does not exist, cannot be adapted, or is not called for an image.
        """
        try:
            import peft
        except ImportError as error:
            told = f"model.adapter: peft is missing: pip install 'distap[adapters]' ({error})"
            raise DistapError(told) from error
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,  # the product is added as it is
            lora_dropout=self.dropout,
            target_modules=self._layers(network.backbone),
            use_dora=self.name == "dora",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(config, network.backbone)
            except ValueError as error:
                raise DistapError(f"model.adapter: peft cannot adapt {', '.join(self.targets)}: {error}") from error
        if idle := _not_called(network, image_size):
            raise DistapError(
                f"model.adapter.targets: {type(network.backbone).__name__} takes the weights of {idle[0]} without "
                "calling the layer, so an adapter would learn nothing: name other layers, such as fc1 and fc2"
            )

    def _layers(self, backbone: nn.Module) -> list[str]:
        # Not convolutions in groups: peft cannot merge their adapters.
        fits = lambda one: isinstance(one, nn.Linear) or (isinstance(one, nn.Conv2d) and one.groups == 1)  # noqa: E731
        layers = [name for name, one in backbone.named_modules() if fits(one)]
        chosen = list[str]()
        for target in self.targets:
            # In blocks alone: timm calls a layer of the patch embedding `proj` too.
            fit = [n for n in layers if n == target or (n.endswith(f".{target}") and OF_BLOCK.search(n))]
            if not fit:
                known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers if OF_BLOCK.search(name)))
                raise DistapError(f"model.adapter.targets: {target} fits no layer of a block; they are {known}")
            chosen += fit
        return chosen


def merge(network: Any) -> None:
    """Add adapters to the matrices of the layers, which take their places again and can be trained."""
    for name, layer in _adapted(network):
        layer.merge()
        network.set_submodule(name, layer.get_base_layer())
    network.backbone.requires_grad_(True)


def _adapted(network: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in network.named_modules() if isinstance(module, BaseTunerLayer)]


def _not_called(network: nn.Module, image_size: int) -> list[str]:
    layers, called, trains = _adapted(network), set[str](), network.training
    hooks = [layer.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, layer in layers]
    device = next(network.parameters()).device
    with torch.no_grad():
        network.eval()(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device))
    network.train(trains)
    for hook in hooks:
        hook.remove()
    return [name for name, _ in layers if name not in called]
