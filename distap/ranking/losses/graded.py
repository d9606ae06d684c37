"""Losses of graded relevance, for labels of several levels: hierarchical AP and NDCG.

The level of a pair is the number of levels at which both images are of one class: L for the same
class at the finest level, which the query has with itself, and 0 for no class in common.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from pydantic import PositiveFloat
from torch import Tensor

from distap.ranking.loss import Presets
from distap.ranking.losses.base import Rows, SimilarityLoss, padded_columns
from distap.ranking.losses.smooth import BoundingStep, SigmoidStep, at_least
from distap.ranking.losses.steps import Sums


class OfLevel(NamedTuple):
    """The images, at most P, that share one level of classes with each of r queries."""

    columns: Int64[Tensor, "r P"]
    is_real: Bool[Tensor, "r P"]  # which are no padding
    relevance: Float[Tensor, "r 1"]
    # Sum of min(relevance of j, relevance of k) over all j not behind k, k itself too; 0 unless
    # counted exactly.
    gain: Float[Tensor, "r P"]
    rank: Float[Tensor, "r P"]  # by steps, differentiable


@dataclass(frozen=True)
class GradedLoss(SigmoidStep, SimilarityLoss):
    """A loss from the smooth ranks of all images that share a class with the query at some
    level."""

    self_pair: Literal[True] = True
    """Count a query as its own most relevant image."""
    query_level: ClassVar[int] = -1

    @abstractmethod
    def relevances(self, sizes: Float[Tensor, "r levels"]) -> Float[Tensor, "r levels"]:
        """Return the relevance of each level from 0, given the number of a query's images at each
        level.
        """

    @abstractmethod
    def score(self, levels: list[OfLevel], sizes: Float[Tensor, "r levels"]) -> Float[Tensor, " r"]:
        """Return each query's score, 1 for a perfect ranking, from the images of levels 1 to L;
        differentiable.
        """

    def value_and_slopes(
        self, rows: Rows, totals: Float64[Tensor, " totals"]
    ) -> tuple[Tensor, ...]:
        similarities = rows.similarities
        level = (rows.levels[rows.queries, None] == rows.levels).sum(2)
        sizes = torch.stack(
            [(level == each).sum(1) for each in range(rows.levels.shape[1] + 1)], 1
        ).to(similarities)
        found = list(self._levels(rows, level, self.relevances(sizes)))
        with torch.enable_grad():
            levels = [one for *_, one in found]
            ranks = [one.rank.requires_grad_() for one in levels]
            value = 1 - self.score(levels, sizes)
            by_rank = torch.autograd.grad((rows.weights * value).sum(), ranks)
        slopes = torch.zeros_like(similarities)
        # A rank rises with the scores of others and falls with the image's own, by the sum of the
        # same slopes.
        for (columns, sums, falls, one), by in zip(found, by_rank, strict=True):
            slopes.scatter_add_(1, columns, sums.slopes(by))
            slopes.scatter_add_(1, one.columns, -by * falls)
        return value.detach(), slopes

    def _levels(
        self, rows: Rows, level: Int64[Tensor, "r N"], relevance: Float[Tensor, "r levels"]
    ) -> Iterator[tuple[Int64[Tensor, "r M"], Sums, Float[Tensor, "r P"], OfLevel]]:
        """Yield, per level, the columns counted smoothly, their sums, how fast counts fall, and the
        images.
        """
        similarities = rows.similarities
        columns = [
            padded_columns(level == each, rows.queries) for each in range(1, relevance.shape[1])
        ]
        # min(rel(j), rel(k)) is one number for all j of a level. Sorted scores then tell how many
        # of them are before each k: N log N for a query, where a comparison of all pairs of images
        # would take N².
        ordered = [
            similarities.gather(1, chosen).masked_fill(~is_real, -torch.inf).sort(dim=1).values
            for chosen, is_real in columns
            if self.counts_exactly
        ]
        for number, (chosen, is_real) in enumerate(columns, 1):
            own = similarities.gather(1, chosen)
            of_own = relevance[:, number, None]
            rank = torch.zeros_like(own)
            gain = torch.zeros_like(own)
            if self.counts_exactly:
                for of_others, scores in zip(
                    relevance[:, 1:].split(1, dim=1), ordered, strict=True
                ):
                    before = at_least(scores, own)
                    gain += torch.minimum(of_own, of_others) * before
                    rank += before * (of_others >= of_own)
                behind, is_less = padded_columns(relevance.gather(1, level) < of_own, rows.queries)
                others = similarities.gather(1, behind).masked_fill(~is_less, -torch.inf)
            else:
                rank += 0.5  # the image itself, which the sum of sigmoids counts by half
                others = similarities
                behind = torch.arange(others.shape[1], device=others.device).expand_as(others)
            sums = self.sums(rows, others, own)
            counts, falls = sums.counts()
            yield behind, sums, falls, OfLevel(chosen, is_real, of_own, gain, rank + counts)


@dataclass(frozen=True)
class HierarchicalAP(BoundingStep, GradedLoss):
    """Hierarchical AP (Ramzi et al. 2022): in the precision at image k, image j counts min(rel(j),
    rel(k)).

    Images of no less relevance are counted exactly, without gradient, and others by SupAP's step.
    """

    relevance: Literal["pop", "map"] = "pop"
    """Share each level's relevance out among its images (pop), as the paper does; or make the loss
    the mean over levels of their APs (map)."""
    alpha: PositiveFloat = 1.0
    """Exponent of the relevance of a level, (level / L)^alpha; more favours the finest level."""
    # elias-ramzi/HAPPIER 5af91b3: happier/losses/rank_losses.py, and its configuration for
    # iNaturalist.
    presets: ClassVar[Presets] = {
        **BoundingStep.presets,
        "inaturalist": {"offset": -4.0, "delta": 0.05, "start": 0.0},
    }

    def relevances(self, sizes: Float[Tensor, "r levels"]) -> Float[Tensor, "r levels"]:
        last = sizes.shape[1] - 1
        if self.relevance == "pop":
            weight = (
                torch.arange(last + 1, device=sizes.device, dtype=sizes.dtype) / last
            ) ** self.alpha
            return torch.where(sizes > 0, weight / sizes.clamp(min=1), 0)
        # An image of level l is a positive of levels 1 to l; each level's AP divides by the number
        # of its positives.
        positives = sizes.flip(1).cumsum(1).flip(1)
        of_level = 1 / (last * positives)
        return torch.cat([torch.zeros_like(of_level[:, :1]), of_level[:, 1:].cumsum(1)], dim=1)

    def score(self, levels: list[OfLevel], sizes: Float[Tensor, "r levels"]) -> Float[Tensor, " r"]:
        total = torch.stack([(one.relevance * one.is_real).sum(1) for one in levels]).sum(0)
        return (
            torch.stack([(one.gain / one.rank * one.is_real).sum(1) for one in levels]).sum(0)
            / total
        )


@dataclass(frozen=True)
class SmoothNDCG(GradedLoss):
    """Normalised discounted cumulative gain, 2^level - 1 over log2(1 + rank), of smooth ranks
    (Ramzi et al. 2025).
    """

    def relevances(self, sizes: Float[Tensor, "r levels"]) -> Float[Tensor, "r levels"]:
        return (
            2 ** torch.arange(sizes.shape[1], device=sizes.device, dtype=sizes.dtype) - 1
        ).expand_as(sizes)

    def score(self, levels: list[OfLevel], sizes: Float[Tensor, "r levels"]) -> Float[Tensor, " r"]:
        # The best order has the images of the highest level first, each in a place of its own.
        places = torch.arange(int(sizes.sum(1).max()) + 1, device=sizes.device, dtype=sizes.dtype)
        discounts = torch.cat([places[:1], 1 / torch.log2(1 + places[1:])]).cumsum(0)
        upward = sizes.flip(1).cumsum(1).flip(1).long()
        gain = list[Tensor]()
        best = list[Tensor]()
        for number, one in enumerate(levels, 1):
            gain.append((one.relevance * one.is_real / torch.log2(1 + one.rank)).sum(1))
            ideal = (
                discounts[upward[:, number]]
                - discounts[(upward[:, number] - sizes[:, number].long())]
            )
            best.append(one.relevance[:, 0] * ideal)
        return torch.stack(gain).sum(0) / torch.stack(best).sum(0)


@dataclass(frozen=True)
class SupNDCG(BoundingStep, SmoothNDCG):
    """NDCG of smooth ranks as in SupAP: less relevant images count by SupAP's step, and others
    exactly.
    """
