"""Pooling: reduce the features of an image to one vector."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.backbone import is_plain


class GeM(nn.Module):
    """Generalised mean with a learned power (Radenović et al. 2018, eq. 3).

    It is the mean of x^p, to the power 1/p.

    Args:
        power: initial p; 1 is the mean, large powers approach the maximum.
    """

    # Features are clamped to at least this, because a fractional power needs positive ones.
    smallest = 1e-6

    def __init__(self, power: float = 3.0) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(float(power)))

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        # The derivative by the power holds the logarithm of a feature: the clamp keeps it finite.
        return (
            features.clamp(min=self.smallest).pow(self.power).mean(dim=(-2, -1)).pow(1 / self.power)
        )

    def extra_repr(self) -> str:
        return f"power={self.power.item():.3g}"


class Mean(nn.Module):
    """Mean over height and width.

    Up to its length this is the sum, SPoC (Babenko and Lempitsky 2015).
    """

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        return features.mean(dim=(-2, -1))


class Max(nn.Module):
    """Maximum over height and width (MAC)."""

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        return features.amax(dim=(-2, -1))


class ClassToken(nn.Module):
    needs_class_token = True

    def forward(
        self, features: Float[Tensor, "n C t 1"], prefix: Float[Tensor, "n p C"]
    ) -> Float[Tensor, "n C"]:
        return prefix[:, 0]


class ClassTokenAndMean(nn.Module):
    """Class token followed by the mean of the image's tokens (as in DINOv2's linear evaluation)."""

    needs_class_token = True
    widens = 2

    def forward(
        self, features: Float[Tensor, "n C t 1"], prefix: Float[Tensor, "n p C"]
    ) -> Float[Tensor, "n 2*C"]:
        return torch.cat([prefix[:, 0], features.mean(dim=(-2, -1))], dim=1)


class Native(nn.Module):
    """The backbone's own pooling, with which it was pretrained: its `forward_head`."""


NAMED: dict[str, Callable[[], nn.Module]] = {
    "mean": Mean,
    "spoc": Mean,
    "max": Max,
    "cls": ClassToken,
    "cls_mean": ClassTokenAndMean,
    "native": Native,
}


def for_pooling(
    pooling: nn.Module, features: Tensor, network: str, prefix: int = 0
) -> tuple[Tensor, ...]:
    """Return the arguments for a pooling: the features, and the class token if it uses that.

    Args:
        features: maps (n, C, h, w), or tokens (n, t, C), which become (n, C, t, 1).
        network: its name in messages.
        prefix: number of first tokens that stand for no part of the image.
    """
    if features.ndim != 3:
        return (features,)
    wants = getattr(pooling, "needs_class_token", False)
    skipped = max(prefix, 1) if wants else prefix  # some networks do not count their class token
    if wants and features.shape[1] == skipped and getattr(pooling, "widens", 1) > 1:
        raise DistapError(
            "network.no_tokens",
            f"pooling: {network} gives no tokens but that of the class; choose cls",
        )
    maps = features[:, skipped:].transpose(1, 2).unsqueeze(-1)
    return (maps, features[:, :skipped]) if wants else (maps,)


def pooled(pooling: nn.Module, features: Tensor) -> Tensor:
    """Pool the output of a caller's network: maps, or tokens of which the first is the class's."""
    result: Tensor = pooling(*for_pooling(pooling, features, "the network"))
    return result


@dataclass(frozen=True)
class GeMPooling:
    """Generalised mean with a learned power, which starts at `power`."""

    power: PositiveFloat = 3.0
    """Initial power; 1 is the mean, large powers approach the maximum."""

    def build(self) -> nn.Module:
        return GeM(self.power)


@dataclass(frozen=True)
class AutoPooling:
    """GeM for a plain CNN, the backbone's own pooling for others."""

    def build(self, backbone: nn.Module | None = None) -> nn.Module:
        """Return GeM for a plain CNN, and Native for other backbones or without one."""
        has_own = backbone is None or (hasattr(backbone, "forward_head") and not is_plain(backbone))
        return Native() if has_own else GeM()


@dataclass(frozen=True)
class NamedPooling:
    """A pooling without settings."""

    name: str

    def build(self) -> nn.Module:
        return NAMED[self.name]()
