"""Pooling: a map of local features becomes one vector."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class GeM(nn.Module):
    """Generalised mean (Radenović et al. 2018, eq. 3), the mean of x^p to the power 1/p, p learned.

    Args:
        power: p at the start; 1 is the mean, large powers approach the maximum.
        smallest: features are raised to it, since a fractional power needs positive ones.
    """

    def __init__(self, power: float = 3.0, smallest: float = 1e-6) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(float(power)))
        self.smallest = smallest

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        """Pool over height and width."""
        powers = features.clamp(min=self.smallest).pow(self.power)
        return powers.mean(dim=(-2, -1)).pow(1 / self.power)

    def extra_repr(self) -> str:
        """Show the power when the network is printed."""
        return f"power={self.power.item():.3g}"


class Mean(nn.Module):
    """The plain mean over height and width."""

    def forward(self, features: Float[Tensor, "n C h w"]) -> Float[Tensor, "n C"]:
        """Pool over height and width."""
        return features.mean(dim=(-2, -1))


POOLING: dict[str, type[nn.Module]] = {"gem": GeM, "mean": Mean}
