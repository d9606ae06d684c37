"""Revisited Oxford and Paris (Radenović et al. 2018): queries whose positives are easy or hard, beside junk.

Easy: positives are the easy images, the hard ones are junk. Medium: both are positives. Hard: positives are the hard
images, the easy ones are junk. Junk is taken out before ranks are counted. AP is the area under the precision-recall
curve by trapezoids, as the published evaluation has it, and mP@k is the share of positives among the first
min(k, rank of the last positive). A query without a positive is left out of that protocol's means and counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.ranks import (
    NONE,
    Ties,
    Tiles,
    negatives_before,
    padded,
    ranks_of_positives,
    require_rankable,
)

AT = (1, 5, 10)
BLOCK_PAIRS = 2**27  # similarities held at once: 512 MB in float32, 70 queries against 1.9 million images


@dataclass(frozen=True)
class GradedQuery:
    """Rows of the gallery that are something to a query; all others are negatives."""

    easy: tuple[int, ...]
    hard: tuple[int, ...]
    junk: tuple[int, ...]


@dataclass(frozen=True)
class ProtocolFigures:
    """Figures of Q queries in one protocol."""

    average_precision: Float64[Tensor, " Q"]  # by trapezoids, NaN for a query without a positive
    precision: Float64[Tensor, "Q at"]  # among the first min(k, rank of the last positive), NaN as well

    @property
    def left_out(self) -> int:
        """Queries without a positive."""
        return int(self.average_precision.isnan().sum())

    @property
    def mean_average_precision(self) -> float:
        """Mean over the queries with a positive; NaN where there is none."""
        return float(self.average_precision.nanmean())


@dataclass(frozen=True)
class GradedResult:
    """Figures of the three protocols."""

    easy: ProtocolFigures
    medium: ProtocolFigures
    hard: ProtocolFigures
    at: tuple[int, ...]  # the k of mP@k

    def summary(self) -> dict[str, float]:
        """MAP and mP@k of each protocol, such as `Medium mAP` and `Hard mP@10`, from 0 to 1."""
        result = {}
        for name, figures in (("Easy", self.easy), ("Medium", self.medium), ("Hard", self.hard)):
            result[f"{name} mAP"] = figures.mean_average_precision
            means = figures.precision.nanmean(0).tolist()
            result |= {f"{name} mP@{k}": mean for k, mean in zip(self.at, means, strict=True)}
        return result


def graded_queries(records: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> list[GradedQuery]:
    """The queries of a `ground_truth.json` of Revisited Oxford or Paris.

    Args:
        records: its `queries`, in the order of the query descriptors.
        rows: row of each image of the gallery by its name.
    Raises:
        DistapError: an image is not in the gallery.
    """
    return [GradedQuery(*(rows_of(record, grade, rows) for grade in ("easy", "hard", "junk"))) for record in records]


def rows_of(record: Mapping[str, Any], grade: str, rows: Mapping[str, int]) -> tuple[int, ...]:
    """Rows of the images that a query's record names; a DistapError where the gallery lacks one."""
    missing = [name for name in record[grade] if name not in rows]
    if missing:
        raise DistapError(
            f"query {record['name']}: {len(missing)} of its {len(record[grade])} {grade} images are not in the "
            f"gallery ({', '.join(missing[:3])}, ...); extract the gallery that the ground truth is for"
        )
    return tuple(rows[name] for name in record[grade])


@torch.no_grad()
def evaluate_graded(
    queries: Float[Tensor, "Q C"],
    gallery: Tensor | NDArray[Any],
    truth: Sequence[GradedQuery],
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    ties: Ties = "pessimistic",
    at: Sequence[int] = AT,
) -> GradedResult:
    """Rank the gallery for each query once, for all three protocols.

    Args:
        queries: of length 1.
        gallery: (N, C) of length 1; a tensor or an array, maybe a memory map of float16, which is read by blocks.
        truth: of each query.
        head: gallery rows that come first for each query, in this order, whatever their similarity.
        ties: `pessimistic` or `index`, see `negatives_before`.
        at: the k of mP@k, some.
    Raises:
        DistapError: descriptors, truth and head do not fit together, or a descriptor is not finite.
    """
    _require_truth(truth, len(queries), len(gallery))
    require_rankable(queries, gallery, head)
    device = queries.device
    easy, hard, junk = (padded([getattr(own, grade) for own in truth], device) for grade in ("easy", "hard", "junk"))
    positives = torch.cat([easy, hard], dim=1)
    before = negatives_before(Tiles(queries, gallery, BLOCK_PAIRS), positives, junk, ties, head)
    is_easy = torch.arange(positives.shape[1], device=device) < easy.shape[1]
    exists = positives != NONE

    def figures(own: Tensor) -> ProtocolFigures:
        return _figures(ranks_of_positives(before, own), at)

    return GradedResult(figures(exists & is_easy), figures(exists), figures(exists & ~is_easy), tuple(at))


def _require_truth(truth: Sequence[GradedQuery], queries: int, gallery: int) -> None:
    if len(truth) != queries:
        raise DistapError(f"there is a truth for {len(truth)} queries and descriptors of {queries}")
    for number, own in enumerate(truth):
        rows = [*own.easy, *own.hard, *own.junk]
        if len(set(rows)) < len(rows):
            raise DistapError(f"query {number}: an image is named twice among its easy, hard and junk ones")
        if rows and not 0 <= min(rows) <= max(rows) < gallery:
            raise DistapError(f"query {number} names row {max(rows)} of a gallery of {gallery} images")


def _figures(ranks: Int64[Tensor, "Q P"], at: Sequence[int]) -> ProtocolFigures:
    exists = ranks > 0
    count = exists.sum(dim=1)
    place = torch.arange(ranks.shape[1], device=ranks.device).double()
    from_zero = (ranks - 1).clamp(min=0)
    # The precision just before a positive: what is above it, all of it right where there is nothing above.
    above = torch.where(from_zero > 0, place / from_zero.clamp(min=1), 1.0)
    heights = torch.where(exists, (above + (place + 1) / (from_zero + 1)) / 2, 0)
    last = ranks.amax(1) if ranks.shape[1] else count
    shown = [last.clamp(max=k) for k in at]
    # 0 / 0 is NaN: a query without a positive has no precision.
    precision = [(exists & (ranks <= first[:, None])).sum(1).double() / first for first in shown]
    return ProtocolFigures(heights.sum(1) / count, torch.stack(precision, dim=1))
