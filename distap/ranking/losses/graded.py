"""Losses of graded relevance, for labels of several levels: hierarchical AP and NDCG.

The level of a pair is the number of levels at which both images are of one class: L for the same
class at the finest level, which the query has with itself, and 0 for no class in common.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import PositiveFloat
from torch import Tensor

from distap.ranking.loss import Presets
from distap.ranking.losses.base import (
    PerPositive,
    PerQuery,
    Rows,
    SimilarityLoss,
    Totals,
    padded_columns,
)
from distap.ranking.losses.smooth import BoundingStep, SigmoidStep, at_least
from distap.ranking.losses.steps import Sums

PerLevel = Float[Tensor, "r levels"]  # of r queries, from level 0, no class in common


class OfLevel(NamedTuple):
    """The images, at most P, that share one level of classes with each of r queries."""

    columns: Int64[Tensor, "r P"]
    is_real: Bool[Tensor, "r P"]  # which are no padding
    relevance: Float[Tensor, "r 1"]
    # Sum of min(relevance of j, relevance of k) over all j not behind k, k itself too; 0 unless
    # counted exactly.
    gain: PerPositive
    rank: PerPositive  # by steps, differentiable
    smooth: Int64[Tensor, "r M"]  # columns of the images that the rank counts smoothly
    sums: Sums  # of these
    falls: PerPositive  # how fast the rank falls as the image's similarity rises


@dataclass(frozen=True)
class GradedLoss(SigmoidStep, SimilarityLoss):
    """A loss from the smooth ranks of all images that share a class at some level."""

    self_pair: Literal[True] = True
    """Count a query as its own most relevant image."""
    query_level: ClassVar[int] = -1

    @abstractmethod
    def relevances(self, sizes: PerLevel) -> PerLevel:
        """Return the relevance of each level from 0, by the number of a query's images at it."""

    @abstractmethod
    def score(self, levels: list[OfLevel], sizes: PerLevel) -> PerQuery:
        """Return each query's score, 1 for a perfect ranking, differentiable by ranks.

        `levels` are the images of levels 1 to L.
        """

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        similarities = rows.similarities
        level = (rows.levels[rows.queries, None] == rows.levels).sum(2)
        counts = [(level == number).sum(1) for number in range(rows.levels.shape[1] + 1)]
        sizes = torch.stack(counts, 1).to(similarities)
        levels = list(self._levels(rows, level, self.relevances(sizes)))
        with torch.enable_grad():
            ranks = [images.rank.requires_grad_() for images in levels]
            value = 1 - self.score(levels, sizes)
            by_rank = torch.autograd.grad((rows.weights * value).sum(), ranks)
        slopes = torch.zeros_like(similarities)
        # A rank rises with the scores of others and falls with the image's own, by the sum of the
        # same slopes.
        for images, by in zip(levels, by_rank, strict=True):
            slopes.scatter_add_(1, images.smooth, images.sums.slopes(by))
            slopes.scatter_add_(1, images.columns, -by * images.falls)
        return value.detach(), slopes

    def _levels(
        self, rows: Rows, level: Int64[Tensor, "r N"], relevance: PerLevel
    ) -> Iterator[OfLevel]:
        similarities = rows.similarities
        columns = [
            padded_columns(level == number, rows.queries) for number in range(1, relevance.shape[1])
        ]
        # min(rel(j), rel(k)) is one number for all j of a level. Sorted scores then tell how many
        # of them are before each k: N log N for a query, where a comparison of all pairs of images
        # would take N².
        ordered = [
            similarities.gather(1, chosen).masked_fill(~is_real, -torch.inf).sort(dim=1).values
            for chosen, is_real in columns
            if self.counts_exactly
        ]
        by_level = relevance[:, 1:].split(1, dim=1)
        for (chosen, is_real), of_level in zip(columns, by_level, strict=True):
            scores = similarities.gather(1, chosen)
            rank = torch.zeros_like(scores)
            gain = torch.zeros_like(scores)
            if self.counts_exactly:
                for of_others, ascending in zip(by_level, ordered, strict=True):
                    before = at_least(ascending, scores)
                    gain += torch.minimum(of_level, of_others) * before
                    rank += before * (of_others >= of_level)
                smooth, is_less = padded_columns(
                    relevance.gather(1, level) < of_level, rows.queries
                )
                counted = similarities.gather(1, smooth).masked_fill(~is_less, -torch.inf)
            else:
                rank += 0.5  # the image itself, which the sum of sigmoids counts by half
                counted = similarities
                smooth = torch.arange(counted.shape[1], device=counted.device).expand_as(counted)
            sums = self.sums(rows, counted, scores)
            counts, falls = sums.counts()
            yield OfLevel(
                columns=chosen,
                is_real=is_real,
                relevance=of_level,
                gain=gain,
                rank=rank + counts,
                smooth=smooth,
                sums=sums,
                falls=falls,
            )


@dataclass(frozen=True)
class HierarchicalAP(BoundingStep, GradedLoss):
    """Hierarchical AP (Ramzi et al. 2022): image j counts min(rel(j), rel(k)) in precision at k.

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

    def relevances(self, sizes: PerLevel) -> PerLevel:
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

    def score(self, levels: list[OfLevel], sizes: PerLevel) -> PerQuery:
        gains = [(level.gain / level.rank * level.is_real).sum(1) for level in levels]
        best = [(level.relevance * level.is_real).sum(1) for level in levels]
        return torch.stack(gains).sum(0) / torch.stack(best).sum(0)


@dataclass(frozen=True)
class SmoothNDCG(GradedLoss):
    """NDCG, gains 2^level - 1 discounted by log2(1 + rank), of smooth ranks (Ramzi et al. 2025)."""

    def relevances(self, sizes: PerLevel) -> PerLevel:
        return (
            2 ** torch.arange(sizes.shape[1], device=sizes.device, dtype=sizes.dtype) - 1
        ).expand_as(sizes)

    def score(self, levels: list[OfLevel], sizes: PerLevel) -> PerQuery:
        # The best order has the images of the highest level first, each in a place of its own.
        places = torch.arange(int(sizes.sum(1).max()) + 1, device=sizes.device, dtype=sizes.dtype)
        discounts = torch.cat([places[:1], 1 / torch.log2(1 + places[1:])]).cumsum(0)
        upward = sizes.flip(1).cumsum(1).flip(1).long()
        gains = list[Tensor]()
        best = list[Tensor]()
        for number, level in enumerate(levels, 1):
            gain = level.relevance * level.is_real / torch.log2(1 + level.rank)
            gains.append(gain.sum(1))
            last = upward[:, number]
            ideal = discounts[last] - discounts[last - sizes[:, number].long()]
            best.append(level.relevance[:, 0] * ideal)
        return torch.stack(gains).sum(0) / torch.stack(best).sum(0)


@dataclass(frozen=True)
class SupNDCG(BoundingStep, SmoothNDCG):
    """NDCG of smooth ranks as in SupAP: only less relevant images count by its step."""
