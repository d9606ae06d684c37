"""Losses of pairs and triplets, mined in the whole global batch: multi-similarity, contrastive, triplet."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from distap.ranking.losses.base import SimilarityLoss

SMALLEST = 1e-12  # squared distance, since the root has no derivative at 0


@dataclass(frozen=True)
class MultiSimilarity(SimilarityLoss):
    """Multi-similarity loss (Wang et al. 2019, eq. 8 to 10), of the pairs that are hard by `epsilon`."""

    self_pair: bool = False
    alpha: PositiveFloat = 2.0  # weighs positives
    beta: PositiveFloat = 50.0  # weighs negatives
    base: float = 0.5  # similarity at which neither weighs more
    epsilon: NonNegativeFloat | None = 0.1  # null takes all pairs

    def loss(
        self, similarities: Float[Tensor, "r N"], positive: Bool[Tensor, "r N"], negative: Bool[Tensor, "r N"]
    ) -> Float[Tensor, " r"]:
        if self.epsilon is not None:
            closest, farthest = _hardest(similarities.detach(), positive, negative)
            positive = positive & (similarities < closest + self.epsilon)
            negative = negative & (similarities > farthest - self.epsilon)
        pulled = _one_and_sum(self.alpha * (self.base - similarities), positive) / self.alpha
        return pulled + _one_and_sum(self.beta * (similarities - self.base), negative) / self.beta


@dataclass(frozen=True)
class Contrastive(SimilarityLoss):
    """Contrastive loss of distances (Hadsell et al. 2006; Radenović et al. 2018, eq. 4).

    A query's loss is the mean of d² / 2 over its positives, and of (margin - d)² / 2 over the negatives that are
    nearer than the margin.
    """

    self_pair: bool = False
    margin: PositiveFloat = 0.7  # distance of descriptors, 0 to 2

    def loss(
        self, similarities: Float[Tensor, "r N"], positive: Bool[Tensor, "r N"], negative: Bool[Tensor, "r N"]
    ) -> Float[Tensor, " r"]:
        distances = _distances(similarities)
        within = negative & (distances < self.margin)
        pulled = (distances.square() * positive).sum(1) / positive.sum(1).clamp(min=1)
        pushed = ((self.margin - distances).square() * within).sum(1) / within.sum(1).clamp(min=1)
        return (pulled + pushed) / 2


@dataclass(frozen=True)
class Triplet(SimilarityLoss):
    """Triplet loss of a query's farthest positive and nearest negative in the whole batch (Hermans et al. 2017)."""

    self_pair: bool = False
    margin: PositiveFloat | None = 0.1  # of distances; null is the soft margin, log(1 + exp)

    def loss(
        self, similarities: Float[Tensor, "r N"], positive: Bool[Tensor, "r N"], negative: Bool[Tensor, "r N"]
    ) -> Float[Tensor, " r"]:
        closest, farthest = _hardest(similarities, positive, negative)
        # Without negatives there is nothing to be nearer than.
        violation = (_distances(farthest) - _distances(closest.clamp(min=-1)))[:, 0] * negative.any(1)
        return softplus(violation) if self.margin is None else (violation + self.margin).clamp(min=0)


def _hardest(
    similarities: Float[Tensor, "r N"], positive: Bool[Tensor, "r N"], negative: Bool[Tensor, "r N"]
) -> tuple[Float[Tensor, "r 1"], Float[Tensor, "r 1"]]:
    """The greatest similarity of a negative, and the least of a positive."""
    closest = similarities.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    return closest, similarities.masked_fill(~positive, torch.inf).amin(1, keepdim=True)


def _one_and_sum(exponents: Float[Tensor, "r N"], taken: Bool[Tensor, "r N"]) -> Float[Tensor, " r"]:
    """log(1 + sum over those taken of e^x)."""
    of_one = torch.zeros_like(exponents[:, :1])
    return torch.cat([of_one, exponents.masked_fill(~taken, -torch.inf)], dim=1).logsumexp(1)


def _distances(similarities: Tensor) -> Tensor:
    return (2 - 2 * similarities).clamp(min=SMALLEST).sqrt()
