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
    """Map images to descriptors of length 1: a generalised mean over scales, then whitening.

    The mean is that of Radenović et al. 2018. In it negative components keep their sign, as in
    Revaud et al. One scale of 1 without whitening gives exactly the network's descriptors.

    Args:
        network: images to descriptors (n, C) of length 1.
        scales: factors of each image's height and width.
        whitening: mean (C,) and projection (D, C) of a linear layer at the end.
        antialias: smooth before shrinking; the code of Radenović et al. and Revaud et al. does not.
        dimensions: D, the first dimensions to keep at the very end; None keeps all.
    Raises:
        DistapError: the scales are unusable, or whitening or dimensions do not fit the network.
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
        _require_scales(scales)
        self.scales = tuple(map(float, scales))
        self.power = _power_of_mean(network)
        self.network = network
        self.antialias = antialias

        mean: Tensor | None = None
        projection: Tensor | None = None
        width = network.dimensions
        if whitening is not None:
            # Whitening is learned in a wider dtype than it needs here.
            mean, projection = (tensor.to(network.mean) for tensor in whitening)
            if mean.shape != (width,) or projection.ndim != 2 or projection.shape[1] != width:
                raise DistapError(
                    "descriptors.other_whitening",
                    f"whitening: it was learned on other descriptors: mean {tuple(mean.shape)} and"
                    f" projection {tuple(projection.shape)}, expected ({width},) and (D, {width})",
                )
            width = len(projection)
        self.register_buffer("mean", mean)
        self.register_buffer("projection", projection)

        self.dimensions = dimensions or width
        self._cuts = dimensions is not None
        if self.dimensions > width:
            raise DistapError(
                "descriptors.too_few_dimensions",
                f"evaluation.dimensions: {dimensions}, but descriptors have {width}",
            )

    def forward(self, images: Images) -> Float[Tensor, "n D"]:
        # Each scale with the whole micro-batch, whose images have one size.
        described = [self._at(images, scale) for scale in self.scales]
        with in_full_precision(images.device):
            descriptors = described[0]
            if len(described) > 1:  # the normalisation cancels the factor 1/n of the mean
                total = sum(
                    (_signed_power(scaled, self.power) for scaled in described),
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


def _require_scales(scales: Sequence[float]) -> None:
    if not scales or not all(0 < scale <= LARGEST_SCALE for scale in scales):
        raise DistapError(
            "evaluation.scales",
            f"scales {list(scales)}: expected numbers above 0 and at most {LARGEST_SCALE:g}",
        )
    if len(set(scales)) < len(scales):
        raise DistapError("evaluation.scales", f"scales {list(scales)}: one appears twice")


def _power_of_mean(network: RetrievalNetwork) -> float:
    """Return the power of the mean over scales: that of GeM, whose descriptors are not negative.

    Source: Radenović et al. 2018. It is 1 for other descriptors, such as projected ones.
    """
    pooling = network.pooling
    is_last = isinstance(network.head, nn.Identity) and not network.layer_norm
    power = pooling.power.item() if is_last and isinstance(pooling, GeM) else 1.0
    if not 0 < power < float("inf"):
        raise DistapError(
            "evaluation.power",
            f"the power of GeM is {power:g}, by which scales are averaged: expected a number"
            " above 0",
        )
    return power


def required_size(network: RetrievalNetwork) -> tuple[int, int] | None:
    """Return the height and width that the backbone requires; None if it takes any."""
    patches = getattr(network.backbone, "patch_embed", None)
    if getattr(patches, "img_size", None) is None or not getattr(patches, "strict_img_size", False):
        return None
    height, width = patches.img_size  # type: ignore[union-attr]  # checked above
    return int(height), int(width)


def _signed_power(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.abs().pow(power) * values.sign()
