"""Descriptors over several scales, and whitening, for extraction, serving and export."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, normalize

from distap.errors import DistapError
from distap.model.network import Images, RetrievalNetwork, in_full_precision
from distap.model.pooling import GeM

LARGEST_SCALE = 8.0


class MultiScaleNetwork(nn.Module):
    """Map images to descriptors of length 1: generalised mean over scales (Radenović et al. 2018),
    whitening.

    In the mean, negative components keep their sign, as in Revaud et al. One scale of 1 without
    whitening gives exactly the network's descriptors. `dimensions` is D.

    Args:
        network: images to descriptors (n, C) of length 1.
        scales: factors of each image's height and width.
        whitening: mean (C,) and projection (D, C) of a linear layer at the end.
        antialias: smooth before shrinking; the code of Radenović et al. and Revaud et al. does not.
        dimensions: D, the first dimensions to keep at the very end; None keeps all.
    """

    mean: Tensor | None
    projection: Tensor | None

    def __init__(
        self,
        network: RetrievalNetwork,
        scales: Sequence[float] = (1.0,),
        whitening: tuple[Tensor, Tensor] | None = None,
        antialias: bool = True,
        dimensions: int | None = None,
    ) -> None:
        super().__init__()
        # GeM's descriptors have no negative component: the mean over scales takes its power
        # (Radenović et al.).
        changed = network.layer_norm or not isinstance(network.head, nn.Identity)
        pooling = network.pooling
        power = 1.0 if changed or not isinstance(pooling, GeM) else pooling.power.item()
        if not scales or not all(0 < scale <= LARGEST_SCALE for scale in scales):
            raise DistapError(
                f"scales {list(scales)}: expected numbers above 0 and at most {LARGEST_SCALE:g}"
            )
        if len(set(scales)) < len(scales):
            raise DistapError(f"scales {list(scales)}: one appears twice")
        if not 0 < power < float("inf"):
            raise DistapError(
                f"the power of GeM is {power:g}, by which scales are averaged: expected a number"
                " above 0"
            )
        self.network = network
        self.power = power
        self.antialias = antialias
        self.scales = tuple(float(scale) for scale in scales)
        mean, projection = whitening or (None, None)
        width = network.dimensions
        if mean is not None and projection is not None:
            if mean.shape != (width,) or projection.ndim != 2 or projection.shape[1] != width:
                raise DistapError(
                    f"whitening: it was learned on other descriptors: mean {tuple(mean.shape)} and"
                    f" projection {tuple(projection.shape)}, expected ({width},) and (D, {width})"
                )
            # Whitening is learned in a wider dtype than it needs here.
            mean, projection, width = (
                mean.to(network.mean),
                projection.to(network.mean),
                len(projection),
            )
        self.dimensions = dimensions or width
        self._cuts = dimensions is not None
        if self.dimensions > width:
            raise DistapError(f"evaluation.dimensions: {dimensions}, but descriptors have {width}")
        self.register_buffer("mean", mean)
        self.register_buffer("projection", projection)

    def forward(self, images: Images) -> Float[Tensor, "n D"]:
        # Each scale with the whole micro-batch, whose images have one size.
        described = [self._at(images, scale) for scale in self.scales]
        with in_full_precision(images.device):
            descriptors = described[0]
            if len(described) > 1:  # the normalisation cancels the factor 1/n of the mean
                total = sum(
                    (_signed_power(each, self.power) for each in described),
                    torch.zeros_like(descriptors),
                )
                descriptors = normalize(_signed_power(total, 1 / self.power))
            if self.mean is not None and self.projection is not None:
                descriptors = normalize(linear(descriptors - self.mean, self.projection))
            return normalize(descriptors[:, : self.dimensions]) if self._cuts else descriptors

    def _at(self, images: Images, scale: float) -> Tensor:
        if scale == 1:
            return self.network(images)
        pixels = images.to(self.network.mean.dtype)
        if not self.antialias:
            # As in the code of Radenović et al.: where the new length is not whole, pixels are
            # still `scale` apart.
            return self.network(interpolate(pixels, scale_factor=scale, mode="bilinear"))
        size = [max(int(length * scale), 1) for length in images.shape[-2:]]
        return self.network(interpolate(pixels, size, mode="bilinear", antialias=True))


def required_size(network: RetrievalNetwork) -> tuple[int, int] | None:
    """Return the height and width that the backbone requires; None if it takes any."""
    patches = getattr(network.backbone, "patch_embed", None)
    if getattr(patches, "img_size", None) is None or not getattr(patches, "strict_img_size", False):
        return None
    height, width = patches.img_size  # type: ignore[union-attr]  # checked above
    return int(height), int(width)


def _signed_power(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.abs().pow(power) * values.sign()
