"""The retrieval network: a backbone, pooling, an optional projection, and L2 normalisation."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize
from torch.utils._pytree import tree_map_only

from distap.errors import DistapError
from distap.model.backbone import TimmBackbone, architecture_of, has_class_token, pixels_of
from distap.model.pooling import AutoPooling, Native, for_pooling

BatchNormMode = Literal["frozen", "batch"]
# Values from 0 to 255; or the descriptors (n, F) of a network without a projection.
Images = (
    UInt8[Tensor, "n 3 height width"] | Float[Tensor, "n 3 height width"] | Float[Tensor, "n F"]
)


class UnitLinear(nn.Linear):
    """A linear layer behind a scaling of its input to length 1."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(normalize(input))


class RetrievalNetwork(nn.Module):
    """Map images to descriptors of length 1.

    Multistage backpropagation needs an image's descriptor not to depend on the other images of its
    micro-batch, so BatchNorm is frozen by default: it stays in evaluation mode, and only its scale
    and shift learn. With `batch`, it normalises by the micro-batch. Passes without a graph then
    leave the running statistics alone, so a step, which describes every image twice, updates them
    once.

    Pooling, head and normalisation compute in float32 even under autocast, because ranking compares
    descriptors that differ by little.

    Args:
        backbone: gives maps (n, C, h, w) or (n, h, w, C), or tokens (n, t, C).
        pooling: turns (n, C, h, w) into (n, C); tokens come as (n, C, t, 1). Native stands for the
            backbone's own.
        projection: dimensions of a linear layer before normalisation; None for no layer.
        batchnorm: `frozen` or `batch`.
        mean, std: of the pixels that the backbone was trained with; white is 1.
        features: C of the maps or tokens; None takes the backbone's own number.
        layer_norm: standardise the pooled vector, without learned scale and shift, as ROADMAP's
            code does.
        unit_length: scale the pooled vector to length 1 before the projection, which then takes
            descriptors too.

    A pooling may have the attributes `needs_class_token` (it then also gets the tokens (n, p, C)
    that stand before those of the image) and `widens` (it gives so many times C numbers).
    """

    mean: Tensor
    std: Tensor
    # Of a trained network: its recipe's section `model`, which names its base, and the tensors of
    # adapters that were merged.
    begun: dict[str, Any] | None = None
    adapters: Mapping[str, Tensor] = MappingProxyType({})
    awaits_values = False  # whether only rank 0 has the values of the parameters yet

    def __init__(
        self,
        backbone: Any,
        pooling: nn.Module,
        projection: int | None = None,
        batchnorm: BatchNormMode = "frozen",
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
        features: int | None = None,
        layer_norm: bool = False,
        unit_length: bool = False,
    ) -> None:
        super().__init__()
        _require_pooling(pooling, backbone)
        # Some backbones (mobilenetv3) have a head that widens the features after the last stage.
        width = (
            features
            or getattr(backbone, "head_hidden_size", None)
            or getattr(backbone, "num_features", None)
        )
        if width is None:
            raise DistapError(
                "network.unknown_width",
                f"model.backbone: {architecture_of(backbone)} lacks num_features, the C of what it"
                " gives",
            )
        self.features = int(width)
        pooled = self.features * int(getattr(pooling, "widens", 1))
        self.dimensions = projection or pooled
        self.batchnorm = batchnorm
        self.layer_norm = layer_norm
        self.memory_format = torch.channels_last  # of the pixels that the backbone gets
        self.backbone = backbone
        self.pooling = pooling
        linear = UnitLinear if unit_length else nn.Linear
        self.head = nn.Identity() if projection is None else linear(pooled, projection)
        self._prefix = int(getattr(backbone, "num_prefix_tokens", 0))
        self._normalisers = [
            module
            for module in backbone.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        # Pixels come from 0 to 255, but timm's mean and std count white as 1.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> "RetrievalNetwork":
        """Set training mode, but keep frozen BatchNorm in evaluation mode."""
        super().train(mode)
        # torch's own `train` would set it back to training mode with each call.
        if self.batchnorm == "frozen":
            for normaliser in self._normalisers:
                normaliser.eval()
        return self

    def forward(self, images: Images) -> Float[Tensor, "n C"]:
        """Return the descriptors of images, of length 1, in float32 or wider."""
        pooled = self.pooled(images) if images.ndim == 4 else images.to(self.mean.dtype)
        with in_full_precision(pooled.device):
            return normalize(self.head(pooled))

    def pooled(self, images: Images) -> Float[Tensor, "n F"]:
        """Return the pooled features of images, before the projection, in float32 or wider."""
        # Channels last: convolutions are faster, on CPUs and on GPUs.
        pixels = (
            images.to(self.mean.dtype, memory_format=self.memory_format) - self.mean
        ) / self.std
        features = self.backbone(pixels)
        with in_full_precision(pixels.device):
            features = tree_map_only(Tensor, lambda tensor: tensor.to(self.mean.dtype), features)
            if isinstance(self.pooling, Native):
                pooled: Tensor = self.backbone.forward_head(features, pre_logits=True)
            else:
                pooled = self.pooling(*self._for_pooling(features))
            return layer_norm(pooled, pooled.shape[-1:]) if self.layer_norm else pooled

    def _for_pooling(self, features: Any) -> Sequence[Tensor]:
        """Return the features as maps (n, C, h, w), with the class token if pooling uses it."""
        if not isinstance(features, Tensor):
            raise DistapError(
                "network.several_maps",
                f"model.backbone: {architecture_of(self.backbone)} gives no single map of features",
            )
        if features.ndim != 4:
            name = architecture_of(self.backbone)
            return for_pooling(self.pooling, features, name, self._prefix)
        is_channels_first = features.shape[1] == self.features
        return (features if is_channels_first else features.permute(0, 3, 1, 2),)


def _require_pooling(pooling: nn.Module, backbone: nn.Module) -> None:
    """Raise a DistapError if the backbone lacks what a pooling needs."""
    if getattr(pooling, "needs_class_token", False) and not has_class_token(backbone):
        raise DistapError(
            "network.no_class_token",
            f"model.pooling takes a class token, which {architecture_of(backbone)} does not"
            " have; choose gem, mean or max",
        )
    if isinstance(pooling, Native) and not hasattr(backbone, "forward_head"):
        raise DistapError(
            "network.no_pooling",
            "model.pooling: native is a pooling of timm's networks, and"
            f" {architecture_of(backbone)} has none; choose gem, mean or max",
        )


def build_network(
    backbone: Any,
    weights: Any,
    pooling: Any,
    projection: int | None = None,
    batchnorm: BatchNormMode = "frozen",
    layer_norm: bool = False,
    unit_length: bool = False,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    image_size: int | None = None,
) -> RetrievalNetwork:
    """Build a RetrievalNetwork from the parts that a recipe chooses.

    Args:
        backbone: its `build()` returns a module with `num_features`.
        weights: its `load(module)` loads weights into that module or, if its `whole` is true, into
            the whole network.
        pooling: its `build()` returns a module; that of AutoPooling depends on the backbone.
        arguments, image_size: of a TimmBackbone's `build`.
    """
    pool = pooling.build()
    if isinstance(backbone, TimmBackbone):
        built = backbone.build(arguments, image_size, pools=isinstance(pool, Native))
    else:
        built = backbone.build()
    if isinstance(pooling, AutoPooling):
        pool = pooling.build(built)
    loads_all = getattr(weights, "whole", False)
    if not loads_all:
        weights.load(built)
    network = RetrievalNetwork(
        built,
        pool,
        projection,
        batchnorm,
        **pixels_of(built),
        layer_norm=layer_norm,
        unit_length=unit_length,
    )
    if loads_all:
        weights.load(network)
    return network.to(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class GivenNetwork:
    """A network given in Python, in place of a recipe's backbone, weights and pooling."""

    # images (n, 3, height, width) to descriptors (n, C), of any length
    given: nn.Module = field(repr=False)

    def build(self) -> nn.Module:
        return self.given

    def load(self, backbone: nn.Module) -> None:
        """Keep the weights of the given network."""

    @property
    def architecture(self) -> str:
        return type(self.given).__name__

    def retrieval_network(
        self, image_size: int, batchnorm: BatchNormMode, device: torch.device
    ) -> RetrievalNetwork:
        """Wrap the module on a device: normalise pixels before it, and descriptors after it.

        The module gets float32 pixels, normalised by the `mean` and `std` of its `pretrained_cfg`
        as timm's networks have them, else from 0 to 1.

        Raises:
            DistapError: the module does not give descriptors (n, C) of images with sides of
                `image_size`.
        """
        module = self.given.to(device)
        if isinstance(module, RetrievalNetwork):
            return module
        pixels = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)} | pixels_of(module)
        network = RetrievalNetwork(
            module,
            nn.Identity(),
            batchnorm=batchnorm,
            **pixels,
            features=_width_of_descriptors(module, image_size, device),
        )
        # The module may `view` its activations, which needs them contiguous.
        network.memory_format = torch.contiguous_format
        return network.to(device)


def _width_of_descriptors(module: nn.Module, image_size: int, device: torch.device) -> int:
    """Return C of the descriptors (n, C) that a module gives; raise a DistapError for others."""
    name = type(module).__name__
    training = [layer for layer in module.modules() if layer.training]
    images = torch.zeros(2, 3, image_size, image_size, device=device)
    try:
        with torch.no_grad():
            output = module.eval()(images)
    except Exception as error:  # whatever the module's own code raises
        raise DistapError(
            "network.fails",
            f"network: {name} cannot describe images {tuple(images.shape)}: {error}",
        ) from error
    finally:
        for layer in training:
            layer.training = True
    if isinstance(output, Tensor):
        if output.ndim == 2 and len(output) == 2:
            return output.shape[1]
        kind = str(tuple(output.shape))
    else:
        kind = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            kind += f" of {', '.join(map(str, output))}"
    raise DistapError(
        "network.no_descriptors",
        f"network: {name} gives {kind} for 2 images; expected descriptors (2, C)",
    )


def fingerprint(network: RetrievalNetwork, with_head: bool = True) -> str:
    """Return a SHA-256, in hexadecimal, of everything that determines a network's descriptors.

    It covers the architecture's name, the pooling and its settings, and the name, dtype, shape and
    bytes of every parameter and buffer, including the mean and deviation of pixels. The device and
    memory layout do not count. Without its head, a network has the fingerprint of one that was
    built without a projection.
    """
    record: dict[str, Any] = {"architecture": architecture_of(network.backbone)}
    record |= settings_of(network.pooling)
    if network.layer_norm:
        record["layer_norm"] = True
    if with_head and isinstance(network.head, UnitLinear):
        record["unit_length"] = True
    for name, digest in digests_of(network).items():
        if with_head or not name.startswith("head."):
            record[name] = digest
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def digests_of(network: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter and buffer, of its dtype, shape and bytes."""
    digests = dict[str, str]()
    for name, tensor in {**network.state_dict(), **dict(network.named_buffers())}.items():
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()
    return digests


def settings_of(pooling: nn.Module) -> dict[str, Any]:
    """Return a pooling's class and settings, without learned values."""
    settings = {
        name: value
        for name, value in vars(pooling).items()
        if name != "training"
        and not name.startswith("_")
        and isinstance(value, bool | int | float | str)
    }
    return {"pooling": type(pooling).__name__, "settings": settings}


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off if it is on; otherwise do nothing, because torch.export cannot trace it."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
