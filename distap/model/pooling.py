"""Pooling turns a map of local features into one vector."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn


class GeM(nn.Module):
    """Generalised mean with a learned power (Radenović et al. 2018, eq. 3): the mean of x^p, to the power 1/p.

    Args:
        power: p at the start; 1 is the mean, large powers approach the maximum.
        smallest: features are clamped to at least this, because a fractional power needs positive ones.
    """

    def __init__(self, power: float = 3.0, smallest: float = 1e-6) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(float(power)))
        self.smallest = smallest

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        powers = features.clamp(min=self.smallest).pow(self.power)
        return powers.mean(dim=(-2, -1)).pow(1 / self.power)

    def extra_repr(self) -> str:
        return f"power={self.power.item():.3g}"


class Mean(nn.Module):
    """Mean over height and width."""

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        return features.mean(dim=(-2, -1))


@dataclass(frozen=True)
class GeMPooling:
    """Generalised mean with a learned power, which starts at `power`."""

    power: PositiveFloat = 3.0

    def build(self) -> nn.Module:
        return GeM(self.power)


@dataclass(frozen=True)
class MeanPooling:
    """Mean over height and width."""

    def build(self) -> nn.Module:
        return Mean()
