"""Figures of a labelled set that need only each image's nearest, by Faiss: R@k, mP@k and mAP@R, no full ranking.

They are those of `evaluate_labelled_set`. Faiss rounds similarities by where a descriptor lies in the gallery, exact
duplicates among them, so a query is ranked in full where a positive is all but as similar as a negative, or the last
image that counts as the one behind it. So are queries with very many positives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.metrics import (
    AT,
    BLOCK_PAIRS,
    Classes,
    average_precision_at_r,
    converted_rows,
    recall_and_precision,
    resident,
)
from distap.retrieval.nearest import nearest
from distap.retrieval.ranks import NONE, Ties, Tiles, negatives_before, ranks_of_positives

MOST = 128  # positives up to which Faiss finds them faster than a full ranking
AS_NEAR = 1e-6  # similarities no further apart may be ties: float32 added up in another order


@dataclass(frozen=True)
class NearestResult:
    """Figures over N images, of which Q are queries."""

    is_query: Bool[Tensor, " N"]
    average_precision_at_r: Float64[Tensor, " N"]  # NaN for no query
    at: Int64[Tensor, " at"]
    hits: Int64[Tensor, "N at"]  # positives among the first k
    ranked_in_full: int  # queries for which the nearest did not tell

    def summary(self) -> dict[str, float]:
        """mAP@R, and R@k and mP@k for each k: means over the queries, from 0 to 1."""
        recall, precision = recall_and_precision(self.hits, self.is_query, self.at)
        return {"mAP@R": float(self.average_precision_at_r[self.is_query].mean()), **recall, **precision}


@torch.no_grad()
def evaluate_nearest(
    descriptors: Tensor | NDArray[Any],
    labels: Int64[Tensor, " N"],
    *,
    at: Sequence[int] = AT,
    ties: Ties = "pessimistic",
) -> NearestResult:
    """Find the nearest of each image; the arguments are those of `evaluate_labelled_set`, on the CPU.

    Raises:
        DistapError: a descriptor is not finite, or no image has another of its class.
    """
    classes, total = Classes(labels), len(labels)
    if classes.most_positives < 1:
        raise DistapError(f"none of the {total} images has another of its class: there is nothing to retrieve")
    descriptors = resident(descriptors, labels.device)
    is_query = classes.members > 1
    small = is_query & (classes.members <= MOST + 1)
    enough = max(*at, int(classes.members[small].max()) - 1 if bool(small.any()) else 0)
    at_r = torch.full((total,), torch.nan, dtype=torch.float64)
    ks = torch.tensor(tuple(at))
    hits = labels.new_zeros(total, len(ks))

    def keep(rows: Tensor, ranks: Tensor) -> None:
        at_r[rows] = average_precision_at_r(ranks, classes.members[rows] - 1)
        hits[rows] = torch.stack([((ranks > 0) & (ranks <= k)).sum(1) for k in ks], dim=1)

    in_full = is_query & ~small
    if bool(small.any()):
        whole = descriptors.numpy() if isinstance(descriptors, Tensor) else descriptors
        similarities, found = map(torch.from_numpy, nearest(whole, whole, enough + 1, exclude_self=True))
        positive = (labels[found] == labels[:, None]) & is_query[:, None]
        as_near = similarities[:, :-1] - similarities[:, 1:] <= AS_NEAR
        mixed = as_near & (positive[:, :-1] != positive[:, 1:])
        if found.shape[1] > enough:  # else all others were found, and there is no end to tie at
            mixed[:, enough - 1] |= as_near[:, enough - 1]
        in_full = is_query & (~small | mixed.any(1))
        rows = (is_query & ~in_full).nonzero().flatten()
        keep(rows, positive[rows] * torch.arange(1, found.shape[1] + 1))
    for rows in classes.blocks(in_full):
        tiles, positives = Tiles(converted_rows(descriptors, rows), descriptors, BLOCK_PAIRS), classes.positives(rows)
        keep(rows, ranks_of_positives(negatives_before(tiles, positives, rows[:, None], ties), positives != NONE))
    return NearestResult(is_query, at_r, ks, hits, int(in_full.sum()))
