"""Descriptors of images at several scales, and whitened: what is extracted, served and exported."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, normalize

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork, in_full_precision
from distap.model.pooling import GeM

LARGEST_SCALE = 8.0  # beyond which an image's pixels would only fill memory
Whitening = tuple[Tensor, Tensor]  # mean (C,), projection (D, C)


class MultiScaleNetwork(nn.Module):
    """Images to descriptors of length 1: the generalised mean over scales (Radenović et al. 2018), then whitening.

    One scale of 1 without whitening is the network itself, bit for bit.

    Attributes:
        dimensions: D of the descriptors.

    Args:
        network: images to descriptors (n, C) of length 1.
        scales: factors by which each image's height and width are multiplied.
        power: of the mean over the scales; None takes `default_power`. Of a negative component it is taken with the
            sign kept, as Revaud et al. do.
        whitening: mean (C,) and projection (D, C) of a linear layer behind it all; None for none.
    Raises:
        DistapError: a setting is no use, or the whitening does not fit the network.
    """

    mean: Tensor | None
    projection: Tensor | None

    def __init__(
        self,
        network: RetrievalNetwork,
        scales: Sequence[float] = (1.0,),
        power: float | None = None,
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__()
        power = default_power(network) if power is None else float(power)
        if not scales or not all(0 < scale <= LARGEST_SCALE for scale in scales):
            raise DistapError(f"scales {list(scales)}: expected numbers above 0, of {LARGEST_SCALE:g} at most")
        if len(set(scales)) < len(scales):
            raise DistapError(f"scales {list(scales)}: one stands there twice")
        if not 0 < power < float("inf"):
            raise DistapError(f"scale power {power:g}: expected a number above 0")
        self.network = network
        self.scales = tuple(float(scale) for scale in scales)
        self.power = power
        mean, projection = (None, None) if whitening is None else _checked(whitening, network.dimensions)
        self.dimensions = network.dimensions if projection is None else len(projection)
        # Of the network's dtype and on its device; what it was learned in is more exact than is needed here.
        self.register_buffer("mean", None if mean is None else mean.to(network.mean))
        self.register_buffer("projection", None if projection is None else projection.to(network.mean))

    def forward(self, images: UInt8[Tensor, "n 3 height width"]) -> Float[Tensor, "n D"]:
        """Descriptors of length 1, float32 or wider."""
        described = [self._at(images, scale) for scale in self.scales]
        with in_full_precision(images.device):
            descriptors = described[0] if len(described) == 1 else normalize(self._mean(described))
            if self.mean is None or self.projection is None:
                return descriptors
            return normalize(linear(descriptors - self.mean, self.projection))

    def _at(self, images: UInt8[Tensor, "n 3 height width"], scale: float) -> Float[Tensor, "n C"]:
        if scale == 1:
            described: Tensor = self.network(images)
            return described
        size: list[Any] = [scaled(length, scale) for length in images.shape[-2:]]
        pixels = interpolate(images.to(self.network.mean.dtype), size, mode="bilinear", antialias=True)
        described = self.network(pixels)
        return described

    def _mean(self, described: list[Float[Tensor, "n C"]]) -> Float[Tensor, "n C"]:
        """To the power 1/p, whose factor for their number the normalisation takes away."""
        total = described[0].new_zeros(described[0].shape)
        for descriptors in described:
            total = total + _signed_power(descriptors, self.power)
        return _signed_power(total, 1 / self.power)


def default_power(network: RetrievalNetwork) -> float:
    """Of the mean over scales: that of GeM where it made the descriptors, so that none is negative, else 1."""
    projected = not isinstance(network.head, nn.Identity)
    return 1.0 if projected or not isinstance(network.pooling, GeM) else network.pooling.power.item()


def scaled(length: int | torch.SymInt, scale: float) -> int | torch.SymInt:
    """Height or width in pixels at a scale, rounded down but at least 1."""
    # Python's int and max would give an export the length that it was traced with, whatever images it is given.
    return torch.sym_max(torch.sym_int(length * scale), 1)


def required_size(network: RetrievalNetwork) -> tuple[int, int] | None:
    """Height and width that the backbone's images must have; None where it takes any."""
    patches = getattr(network.backbone, "patch_embed", None)
    if getattr(patches, "img_size", None) is None or not getattr(patches, "strict_img_size", False):
        return None
    height, width = patches.img_size  # type: ignore[union-attr]  # it has one
    return int(height), int(width)


def _signed_power(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.abs().pow(power) * values.sign()


def _checked(whitening: Whitening, dimensions: int) -> Whitening:
    mean, projection = whitening
    if mean.shape != (dimensions,) or projection.ndim != 2 or projection.shape[1] != dimensions:
        raise DistapError(
            f"whitening: mean {tuple(mean.shape)} and projection {tuple(projection.shape)} for descriptors of "
            f"{dimensions} dimensions; expected ({dimensions},) and (D, {dimensions}): it was learned on others"
        )
    return mean, projection
