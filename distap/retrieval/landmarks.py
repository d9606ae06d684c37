"""Google Landmarks v2, retrieval (Weyand et al. 2020): mAP@100 of the public and the private queries.

AP@100 is the sum of precision at the ranks of the positives among the first 100, by the number of positives or 100
where there are more. P@10 is the share of positives among the first 10. A query without a positive is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.graded import rows_of
from distap.retrieval.ranks import (
    NONE,
    Ties,
    Tiles,
    negatives_before,
    padded,
    precision_at_positives,
    ranks_of_positives,
    require_rankable,
)

Usage = Literal["Public", "Private"]
SHOWN, FIRST = 100, 10
BLOCK_PAIRS = 2**27  # similarities held at once: 512 MB in float32


@dataclass(frozen=True)
class LandmarkQuery:
    """Rows of the gallery that show a query's landmark, and which of the two halves it counts for."""

    positives: tuple[int, ...]
    usage: Usage


@dataclass(frozen=True)
class LandmarkResult:
    """Figures of Q queries."""

    average_precision: Float64[Tensor, " Q"]  # AP@100, NaN for a query without a positive
    precision: Float64[Tensor, " Q"]  # P@10, NaN as well
    is_public: Bool[Tensor, " Q"]

    @property
    def left_out(self) -> int:
        """Queries without a positive."""
        return int(self.average_precision.isnan().sum())

    def summary(self) -> dict[str, float]:
        """mAP@100 and mP@10 of all queries and of both halves, from 0 to 1; NaN where a half has no query."""
        halves = {"": self.is_public | True, "Public ": self.is_public, "Private ": ~self.is_public}
        result = {}
        for name, chosen in halves.items():
            result[f"{name}mAP@{SHOWN}"] = float(self.average_precision[chosen].nanmean())
            result[f"{name}mP@{FIRST}"] = float(self.precision[chosen].nanmean())
        return result


def landmark_queries(records: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> list[LandmarkQuery]:
    """The queries of a `ground_truth.json` of Google Landmarks v2.

    Args:
        records: its `queries`, in the order of the query descriptors.
        rows: row of each image of the gallery by its name.
    Raises:
        DistapError: an image is not in the gallery, or a usage is neither Public nor Private.
    """
    wrong = sorted({str(record["usage"]) for record in records} - {"Public", "Private"})
    if wrong:
        raise DistapError(f"the ground truth has queries of usage {', '.join(wrong)}; expected Public or Private")
    return [LandmarkQuery(rows_of(record, "positives", rows), record["usage"]) for record in records]


@torch.no_grad()
def evaluate_landmarks(
    queries: Float[Tensor, "Q C"],
    gallery: Tensor | NDArray[Any],
    truth: Sequence[LandmarkQuery],
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    ties: Ties = "pessimistic",
) -> LandmarkResult:
    """Rank the gallery for each query, in blocks of queries.

    Args:
        queries: of length 1.
        gallery: (N, C) of length 1; a tensor or an array, maybe a memory map of float16, which is read by blocks.
        truth: of each query.
        head: gallery rows that come first for each query, in this order, whatever their similarity.
        ties: `pessimistic` or `index`, see `negatives_before`.
    Raises:
        DistapError: descriptors, truth and head do not fit together, or a descriptor is not finite.
    """
    if len(truth) != len(queries):
        raise DistapError(f"there is a truth for {len(truth)} queries and descriptors of {len(queries)}")
    for number, own in enumerate(truth):
        if own.positives and not 0 <= min(own.positives) <= max(own.positives) < len(gallery):
            raise DistapError(f"query {number} names row {max(own.positives)} of a gallery of {len(gallery)} images")
    require_rankable(queries, gallery, head)
    height = max(BLOCK_PAIRS // len(gallery), 1)
    precision, first = [], []
    for start in range(0, len(queries), height):
        part = slice(start, start + height)
        positives = padded([np.unique(own.positives) for own in truth[part]], queries.device)
        tiles = Tiles(queries[part], gallery, BLOCK_PAIRS)
        ignored = positives[:, :0]
        before = negatives_before(tiles, positives, ignored, ties, None if head is None else head[part])
        ranks = ranks_of_positives(before, positives != NONE)
        count = (ranks > 0).sum(1)
        found = precision_at_positives(ranks).masked_fill(ranks > SHOWN, 0).sum(1)
        # 0 / 0 is NaN: a query without a positive has no precision.
        precision.append(found / count.clamp(max=SHOWN))
        hits = ((ranks > 0) & (ranks <= FIRST)).sum(1).double() / FIRST
        first.append(hits.masked_fill(count == 0, torch.nan))
    is_public = torch.tensor([own.usage == "Public" for own in truth], dtype=torch.bool, device=queries.device)
    return LandmarkResult(torch.cat(precision), torch.cat(first), is_public)
