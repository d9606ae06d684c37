"""Exact retrieval figures of a labelled set: every image is a query against all others.

Definitions, since public codebases disagree: the query itself is removed by its index; AP is the finite sum of
precision at the ranks of the positives, over the full ranking; mAP@R (Musgrave et al. 2020) stops at R, the
number of positives; a query without a positive is left out and counted; an image that belongs to no class is in the
gallery, but no query. By default a positive ranks after the negatives that it ties with, so that a network that maps
every image to the same descriptor scores near zero and not one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.ranks import (
    NONE,
    Ties,
    Tiles,
    converted,
    interpolated_precision,
    mask,
    negatives_before,
    precision_at_positives,
    ranks_of_positives,
    require_finite,
    require_head,
)

AT = (1, 5, 10)
BLOCK_PAIRS = 2**26  # similarities held at once: 256 MB in float32
RESIDENT_BYTES = 2**30  # up to which a gallery is converted once, not for every block of queries
CHUNK = 64  # columns whose greatest similarity stands for them when neighbours are looked for


@dataclass(frozen=True)
class ClassFigures:
    """Figures of K classes, each the mean over its queries."""

    classes: Int64[Tensor, " K"]  # ascending
    queries: Int64[Tensor, " K"]
    mean_average_precision: Float64[Tensor, " K"]
    mean_average_precision_at_r: Float64[Tensor, " K"]
    recall: Float64[Tensor, "K at"]  # R@k


@dataclass(frozen=True)
class LabelledSetResult:
    """Figures over N images, of which Q are queries."""

    average_precision: Float64[Tensor, " N"]  # of each query over the full ranking, NaN for no query
    average_precision_at_r: Float64[Tensor, " N"]
    first_positive: Int64[Tensor, " N"]  # rank, from 1, of the best positive; 0 for no query
    neighbours: Int64[Tensor, "N k"]  # the most similar other images, best first
    # Mean over the queries of the greatest precision at any recall of at least r, for r = 0, 0.01 ... 1.
    precision_at_recall: Float64[Tensor, "101"]
    at: Int64[Tensor, " at"]  # the k that R@k and mP@k are for
    hits: Int64[Tensor, "N at"]  # positives among the first k

    @property
    def is_query(self) -> Bool[Tensor, " N"]:
        """Which images have another one of their class."""
        return self.first_positive > 0

    @property
    def without_positive(self) -> int:
        """Images that are no query."""
        return int((~self.is_query).sum())

    def summary(self) -> dict[str, float]:
        """mAP, mAP@R and R@k for each k: means over the queries, from 0 to 1."""
        return {
            "mAP": float(self.average_precision[self.is_query].mean()),
            "mAP@R": float(self.average_precision_at_r[self.is_query].mean()),
            **recall_and_precision(self.hits, self.is_query, self.at)[0],
        }

    def precision_at(self) -> dict[str, float]:
        """mP@k for each k: positives among the first k, or among all others where there are fewer than k."""
        return recall_and_precision(self.hits, self.is_query, self.at)[1]

    def of_classes(self, labels: Int64[Tensor, " N"]) -> ClassFigures:
        """Means over the queries of each class that has any.

        Args:
            labels: class of each image, those that were evaluated.
        """
        queries = self.is_query
        classes, number = labels[queries].unique(return_inverse=True)
        count = torch.bincount(number, minlength=len(classes))

        def mean(of_query: Tensor) -> Tensor:
            return torch.zeros_like(count, dtype=torch.float64).index_add_(0, number, of_query.double()) / count

        recall = torch.stack([mean(found) for found in (self.hits[queries] > 0).t()], dim=1)
        precision, at_r = self.average_precision[queries], self.average_precision_at_r[queries]
        return ClassFigures(classes, count, mean(precision), mean(at_r), recall)


@torch.no_grad()
def evaluate_labelled_set(
    descriptors: Tensor | NDArray[Any],
    labels: Int64[Tensor, " N"],
    neighbours: int = 10,
    *,
    at: Sequence[int] = AT,
    ties: Ties = "pessimistic",
    head: Int64[Tensor, "N K"] | None = None,
    queries: Tensor | NDArray[Any] | None = None,
) -> LabelledSetResult:
    """Rank all images for each image, in blocks of queries.

    Args:
        descriptors: (N, C) of length 1, so that the dot product is the cosine; on any device, or an array, maybe a
            memory map of float16.
        labels: class of each image, -1 for none.
        neighbours: most similar images to report.
        at: the k of R@k and mP@k, some.
        ties: `pessimistic` or `index`, see `negatives_before`.
        head: other images that come first for each image, in this order, whatever their similarity.
        queries: descriptors of the same images as queries, where those are others than in the gallery.
    Raises:
        DistapError: a descriptor is not finite, no image has another of its class, or the head is none.
    """
    total = len(labels)
    classes = Classes(labels)
    if classes.most_positives < 1:
        raise DistapError(f"none of the {total} images has another of its class: there is nothing to retrieve")
    require_head(head, total, total)
    if head is not None and bool((head == torch.arange(total, device=head.device)[:, None]).any()):
        raise DistapError("a re-ranked head names the query itself, which is not in its gallery")
    descriptors = resident(descriptors, labels.device)
    asking = descriptors if queries is None else resident(queries, labels.device)
    neighbours = min(neighbours, total - 1)
    precision = torch.full((total,), torch.nan, dtype=torch.float64, device=labels.device)
    at_r, first = precision.clone(), torch.zeros_like(labels)
    ks = torch.tensor(tuple(at), device=labels.device)
    hits, nearest = labels.new_zeros(total, len(ks)), labels.new_zeros(total, neighbours)
    curve, asked = precision.new_zeros(101), 0
    for rows in classes.blocks(classes.members > (-1 if neighbours else 1)):
        tiles = Tiles(converted_rows(asking, rows), descriptors, BLOCK_PAIRS)
        if neighbours:
            nearest[rows] = _nearest(tiles, rows, neighbours)
            if head is not None:
                nearest[rows] = _headed(head[rows], nearest[rows])
        positives = classes.positives(rows)
        before = negatives_before(tiles, positives, rows[:, None], ties, None if head is None else head[rows])
        ranks = ranks_of_positives(before, positives != NONE)
        count = (ranks > 0).sum(1)
        # 0 / 0 is NaN: a query without a positive has no precision.
        precision[rows] = precision_at_positives(ranks).sum(1) / count
        at_r[rows] = average_precision_at_r(ranks, count)
        first[rows] = ranks[:, 0]
        hits[rows] = torch.stack([((ranks > 0) & (ranks <= k)).sum(1) for k in ks], dim=1)
        is_query = ranks[:, 0] > 0
        curve += interpolated_precision(ranks[is_query]).sum(0)
        asked += int(is_query.sum())
    return LabelledSetResult(precision, at_r, first, nearest, curve / asked, ks, hits)


class Classes:
    """The images of each class of a labelled set."""

    def __init__(self, labels: Int64[Tensor, " N"]) -> None:
        self._by_class = labels.argsort(stable=True)
        _, self._class, counts = labels.unique(return_inverse=True, return_counts=True)
        self._start = counts.cumsum(0) - counts
        counts_of_classes = torch.where(labels[self._by_class[self._start]] < 0, 0, counts)
        self.members = counts_of_classes[self._class]  # (N,) images of the image's class, 0 if it belongs to none

    @property
    def most_positives(self) -> int:
        """Greatest number of positives of an image."""
        return int(self.members.max()) - 1 if len(self.members) else 0

    def blocks(self, chosen: Bool[Tensor, " N"]) -> Iterator[Int64[Tensor, " q"]]:
        """Those of the chosen images whose rankings fit into memory together, those of the greatest classes first."""
        order = self.members.argsort(descending=True, stable=True)
        order = order[chosen[order]]
        start = 0
        while start < len(order):
            # A dozen tables of ranks and places are as wide as the greatest number of positives.
            width = max(len(self.members), 16 * int(self.members[order[start]]))
            height = max(BLOCK_PAIRS // width, 1)
            yield order[start : start + height]
            start += height

    def positives(self, rows: Int64[Tensor, " q"]) -> Int64[Tensor, "q P"]:
        """The other images of the class of each of some images."""
        count = self.members[rows, None]
        place = torch.arange(max(int(count.max()), 1), device=rows.device)
        found = self._by_class[(self._start[self._class[rows], None] + place).clamp(max=len(self._by_class) - 1)]
        return found.masked_fill((place >= count) | (found == rows[:, None]), NONE)


def resident(descriptors: Tensor | NDArray[Any], device: torch.device) -> Tensor | NDArray[Any]:
    """Descriptors as a tensor on the device of the labels, unless that takes so much that it is done by blocks."""
    wide = descriptors.dtype in (torch.float64, "float64")
    like = torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=device)
    if not isinstance(descriptors, Tensor) and descriptors.size * 4 > RESIDENT_BYTES:
        return descriptors
    rows = converted(descriptors, like)
    require_finite(rows)
    return rows


def converted_rows(descriptors: Tensor | NDArray[Any], rows: Int64[Tensor, " q"]) -> Tensor:
    """Some of the descriptors, in float32 unless they are in float64."""
    if isinstance(descriptors, Tensor):
        return descriptors[rows]
    return converted(descriptors[rows.cpu().numpy()], torch.empty(0, device=rows.device))


def _nearest(tiles: Tiles, rows: Tensor, neighbours: int) -> Tensor:
    """The most similar images, best first, but for the image itself."""
    parts = []
    for span, similarities in tiles:
        mask(similarities, span, rows[:, None])
        values, columns = greatest(similarities, min(neighbours, len(span)))
        parts.append((values, columns + span.start))
    values, found = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return found.gather(1, values.topk(neighbours, dim=1).indices)


def greatest(similarities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As torch.topk, but several times faster: only chunks with one of the `count` greatest maxima are looked at."""
    whole = similarities.shape[1] // CHUNK
    if whole <= 2 * count:
        values, columns = similarities.topk(count, dim=1)
        return values, columns
    chunks = similarities[:, : whole * CHUNK].unflatten(1, (whole, CHUNK))
    best = chunks.amax(2).topk(count, dim=1).indices
    inside = torch.arange(CHUNK, device=similarities.device)
    columns = (best[:, :, None] * CHUNK + inside).flatten(1)
    rest = torch.arange(whole * CHUNK, similarities.shape[1], device=similarities.device)
    columns = torch.cat([columns, rest.expand(len(columns), -1)], dim=1)
    values, places = similarities.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, places)


def _headed(head: Tensor, nearest: Tensor) -> Tensor:
    """The nearest images with the head before them, as many as they were."""
    later = nearest.clone()
    for own, first in zip(later, head, strict=True):
        own[:] = torch.cat([first, own[~torch.isin(own, first)]])[: len(own)]
    return later


def recall_and_precision(
    hits: Int64[Tensor, "N at"], is_query: Bool[Tensor, " N"], at: Int64[Tensor, " at"]
) -> tuple[dict[str, float], dict[str, float]]:
    """R@k and mP@k for each k, from the positives among the first k."""
    own = hits[is_query].double()
    recall, precision = (own > 0).double().mean(0), (own / at.clamp(max=len(hits) - 1)).mean(0)
    ks = at.tolist()
    return (
        {f"R@{k}": value for k, value in zip(ks, recall.tolist(), strict=True)},
        {f"mP@{k}": value for k, value in zip(ks, precision.tolist(), strict=True)},
    )


def average_precision_at_r(ranks: Int64[Tensor, "q P"], count: Int64[Tensor, " q"]) -> Float64[Tensor, " q"]:
    """AP@R from the ranks of the positives and their number, R; NaN where there is none."""
    # Ranks are ascending but for gaps of 0, and the place of a positive is the number of those before it.
    place = (ranks > 0).cumsum(1)
    within = (ranks > 0) & (ranks <= count[:, None])
    return torch.where(within, place.double() / ranks.clamp(min=1), 0).sum(1) / count
