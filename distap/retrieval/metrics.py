"""Exact retrieval figures of a labelled set: every image is a query against all others.

Definitions, since public codebases disagree: the query itself is removed by its index; AP is the finite sum of
precision at the ranks of the positives, over the full ranking; mAP@R (Musgrave et al. 2020) stops at R, the
number of positives; a query without a positive is left out and counted; and a positive ranks after the negatives
that it ties with, so that a network that maps every image to the same descriptor scores near zero and not one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from distap.errors import DistapError

RECALL_AT = (1, 5, 10)
BLOCK_PAIRS = 2**23  # similarities held at once: 32 MB in float32


@dataclass(frozen=True)
class LabelledSetResult:
    """Figures over N images, of which Q are queries."""

    average_precision: Float64[Tensor, " N"]  # of each query over the full ranking, NaN for no query
    average_precision_at_r: Float64[Tensor, " N"]
    first_positive: Int64[Tensor, " N"]  # rank, from 1, of the best positive; 0 for no query
    neighbours: Int64[Tensor, "N k"]  # the most similar other images, best first
    # Mean over the queries of the greatest precision at any recall of at least r, for r = 0, 0.01 ... 1.
    precision_at_recall: Float64[Tensor, "101"]

    @property
    def is_query(self) -> Bool[Tensor, " N"]:
        """Which images have another one of their class."""
        return self.first_positive > 0

    @property
    def without_positive(self) -> int:
        """Images that are no query."""
        return int((~self.is_query).sum())

    def summary(self) -> dict[str, float]:
        """mAP, mAP@R, R@1, R@5 and R@10: means over the queries, from 0 to 1."""
        queries = self.is_query
        first = self.first_positive[queries]
        return {
            "mAP": float(self.average_precision[queries].mean()),
            "mAP@R": float(self.average_precision_at_r[queries].mean()),
            **{f"R@{k}": float((first <= k).double().mean()) for k in RECALL_AT},
        }

    def of_classes(self, labels: Int64[Tensor, " N"]) -> "ClassFigures":
        """Means over the queries of each class that has any.

        Args:
            labels: class of each image, those that were evaluated.
        """
        queries = self.is_query
        classes, number = labels[queries].unique(return_inverse=True)
        count = torch.bincount(number, minlength=len(classes))

        def mean(of_query: Tensor) -> Tensor:
            return torch.zeros_like(count, dtype=torch.float64).index_add_(0, number, of_query.double()) / count

        first = self.first_positive[queries]
        recall = torch.stack([mean(first <= k) for k in RECALL_AT], dim=1)
        precision, at_r = self.average_precision[queries], self.average_precision_at_r[queries]
        return ClassFigures(classes, count, mean(precision), mean(at_r), recall)


@dataclass(frozen=True)
class ClassFigures:
    """Figures of K classes, each the mean over its queries."""

    classes: Int64[Tensor, " K"]  # ascending
    queries: Int64[Tensor, " K"]
    mean_average_precision: Float64[Tensor, " K"]
    mean_average_precision_at_r: Float64[Tensor, " K"]
    recall: Float64[Tensor, "K at"]  # R@1, R@5 and R@10


@torch.no_grad()
def evaluate_labelled_set(
    descriptors: Float[Tensor, "N C"], labels: Int64[Tensor, " N"], neighbours: int = 10
) -> LabelledSetResult:
    """Rank all images for each image, in blocks of queries.

    Args:
        descriptors: of length 1, so that the dot product is the cosine.
        labels: class of each image.
        neighbours: most similar images to report.
    Raises:
        DistapError: a descriptor is not finite, or no image has another of its class.
    """
    total = len(labels)
    if not bool(descriptors.isfinite().all()):
        lost = int((~descriptors.isfinite().all(1)).sum())
        raise DistapError(
            f"{lost} of {total} descriptors are not finite: the network is broken, nothing can be ranked"
        )
    most_positives = int(torch.unique(labels, return_counts=True)[1].max()) - 1 if total else 0
    if most_positives < 1:
        raise DistapError(f"none of the {total} images has another of its class: there is nothing to retrieve")
    parts = list(_blocks(descriptors, labels, most_positives, min(neighbours, total - 1)))
    *figures, interpolated = (torch.cat(part) for part in zip(*parts, strict=True))
    return LabelledSetResult(*figures, precision_at_recall=interpolated.mean(0))


def _blocks(
    descriptors: Tensor, labels: Tensor, most_positives: int, neighbours: int
) -> Iterator[tuple[Tensor, ...]]:
    total = len(labels)
    height = max(BLOCK_PAIRS // total, 1)
    for start in range(0, total, height):
        queries = torch.arange(start, min(start + height, total), device=labels.device)
        row = torch.arange(len(queries), device=labels.device)
        similarities = descriptors[queries] @ descriptors.t()
        similarities[row, queries] = -torch.inf
        positive = labels[queries, None] == labels[None]
        positive[row, queries] = False
        ranks = ranks_of_positives(similarities, positive, most_positives)
        best = similarities.topk(neighbours, dim=1).indices
        exists = ranks[:, 0] > 0
        yield (*_precisions(ranks), best, interpolated_precision(ranks[exists]))


def ranks_of_positives(
    similarities: Float[Tensor, "q N"], positive: Bool[Tensor, "q N"], most: int
) -> Int64[Tensor, "q most"]:
    """Ranks, from 1, of each query's positives in the order of their similarity, 0 behind the last.

    Args:
        similarities: minus infinity for what is not in the gallery.
        positive: which columns are positives.
        most: greatest number of positives of a query.
    """
    ascending = similarities.sort(dim=1).values
    of_positives = similarities.masked_fill(~positive, -torch.inf).topk(most, dim=1).values
    # The p-th best positive comes behind all negatives that are as similar, and p - 1 positives.
    as_similar = similarities.shape[1] - torch.searchsorted(ascending, of_positives.contiguous())
    positives_ascending = of_positives.flip(1).contiguous()
    positives_as_similar = most - torch.searchsorted(positives_ascending, of_positives.contiguous())
    place = torch.arange(1, most + 1, device=similarities.device)
    exists = place <= positive.sum(dim=1, keepdim=True)
    return torch.where(exists, as_similar - positives_as_similar + place, 0)


def _precisions(ranks: Int64[Tensor, "q most"]) -> tuple[Tensor, Tensor, Tensor]:
    """AP, AP@R and the rank of the first positive from the ranks of the positives."""
    exists = ranks > 0
    count = exists.sum(dim=1)
    place = torch.arange(1, ranks.shape[1] + 1, device=ranks.device).double()
    precision = torch.where(exists, place / ranks.clamp(min=1), 0)
    within_r = precision * (ranks <= count[:, None])
    # 0 / 0 is NaN: a query without a positive has no precision.
    return precision.sum(1) / count, within_r.sum(1) / count, ranks[:, 0]


def interpolated_precision(ranks: Int64[Tensor, "q most"]) -> Float64[Tensor, "q 101"]:
    """Greatest precision at any recall of at least r, for r = 0, 0.01 ... 1, of queries that have a positive."""
    count = (ranks > 0).sum(dim=1, keepdim=True)
    place = torch.arange(1, ranks.shape[1] + 1, device=ranks.device).double()
    precision = torch.where(ranks > 0, place / ranks.clamp(min=1), 0)
    greatest_behind = precision.flip(1).cummax(dim=1).values.flip(1)
    # Recall r needs r x count positives, rounded up; in whole numbers, since 0.07 x 100 is more than 7.
    needed = (torch.arange(101, device=ranks.device) * count + 99) // 100
    return greatest_behind.gather(1, needed.clamp(min=1) - 1)
