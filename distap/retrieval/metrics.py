"""Exact retrieval metrics of a labelled set: every image is a query against all others.

Public codebases disagree, so here are the definitions:

- The query itself is removed by its index, never by its similarity.
- AP is the finite sum of precision at the ranks of the positives, over the full ranking.
- mAP@R (Musgrave et al. 2020) stops at R, the number of positives of the query.
- A query without a positive is left out and counted. An image without a class is in the gallery, but is no query.
- A positive ranks after the negatives that it ties with, so that a network that maps every image to the
  same descriptor scores near zero and not one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.ranks import (
    NONE,
    Tiles,
    best,
    converted,
    interpolated_precision,
    negatives_before,
    padded,
    precision_at_positives,
    ranks_of_positives,
    require_finite,
    require_head,
)
from distap.world import ALONE, World

AT = (1, 5, 10)  # the k of R@k and P@k unless others are asked for
BLOCK_PAIRS = 2**26  # similarities held at once: 256 MB in float32
MOST_QUERIES = 256  # of a block, so that many ranks have one
RESIDENT_BYTES = 2**30  # a gallery up to this size is converted once, a larger one for every block of queries


@dataclass(frozen=True)
class LabelledSetResult:
    """Figures over N images, of which Q are queries."""

    average_precision: Float64[Tensor, " N"]  # over the full ranking; NaN if the image is no query
    average_precision_at_r: Float64[Tensor, " N"]
    first_positive: Int64[Tensor, " N"]  # rank, from 1, of the best positive; 0 if the image is no query
    neighbours: Int64[Tensor, "N k"]  # the most similar other images, best first
    # Mean over the queries of the greatest precision at any recall of at least r, for r = 0, 0.01 ... 1.
    precision_at_recall: Float64[Tensor, "101"]
    hits: Int64[Tensor, "N K"]  # positives among the first k, for each k of `at`
    others: int  # images that each query is ranked against
    at: tuple[int, ...] = AT

    @property
    def is_query(self) -> Bool[Tensor, " N"]:
        """Which images have another image of their class."""
        return self.first_positive > 0

    def summary(self) -> dict[str, float]:
        """Means over the queries, from 0 to 1: mAP, mAP@R, and R@k and mP@k for each k.

        P@k is the share of positives among the first k, or among all others if there are fewer than k.
        """
        rows = self.is_query
        hits = self.hits[rows].double()
        right = (hits / torch.tensor(self.at, device=hits.device).clamp(max=self.others)).mean(0).tolist()
        return {
            "mAP": float(self.average_precision[rows].mean()),
            "mAP@R": float(self.average_precision_at_r[rows].mean()),
            **{f"R@{k}": value for k, value in zip(self.at, (hits > 0).double().mean(0).tolist(), strict=True)},
            **{f"mP@{k}": value for k, value in zip(self.at, right, strict=True)},
        }

    def class_figures(self, labels: Int64[Tensor, " N"]) -> dict[int, dict[str, int | float]]:
        """Number of queries, and mean mAP, mAP@R and R@k over them, of each class that has queries."""
        queries = self.is_query
        classes, number, counts = labels[queries].unique(return_inverse=True, return_counts=True)
        hits = (self.hits[queries] > 0).t()
        of_query = {
            "mAP": self.average_precision[queries],
            "mAP@R": self.average_precision_at_r[queries],
            **{f"R@{k}": hit for k, hit in zip(self.at, hits, strict=True)},
        }
        columns: dict[str, list[int | float]] = {"queries": counts.tolist()}
        columns |= {name: (number.bincount(values.double()) / counts).tolist() for name, values in of_query.items()}
        rows = zip(*columns.values(), strict=True)
        return {
            label: dict(zip(columns, row, strict=True)) for label, row in zip(classes.tolist(), rows, strict=True)
        }


@torch.no_grad()
def evaluate_labelled_set(
    descriptors: Tensor | NDArray[Any],
    labels: Int64[Tensor, " N"],
    neighbours: int = 10,
    *,
    head: Int64[Tensor, "N K"] | None = None,
    queries: Tensor | NDArray[Any] | None = None,
    at: tuple[int, ...] = AT,
    world: World = ALONE,
) -> LabelledSetResult:
    """Rank all images for each image, in blocks of queries.

    Args:
        descriptors: (N, C) of length 1, so that the dot product is the cosine; a tensor on any device, or an array,
            possibly a memory map of float16.
        labels: class of each image, -1 for none.
        neighbours: number of most similar images to report.
        head: other images that come first for each image, in this order, whatever their similarity.
        queries: descriptors of the same images as queries, if they differ from those in the gallery.
        at: the k of R@k and P@k.
        world: ranks that share the queries; all call this with the same arguments, and get the same bits as one.
    """
    total = len(labels)
    classes = _ClassMembers(labels)
    if not bool((classes.members > 1).any()):
        raise DistapError(f"none of the {total} images has another of its class: there is nothing to retrieve")
    require_head(head, total, total)
    if head is not None and bool((head == torch.arange(total, device=head.device)[:, None]).any()):
        raise DistapError("a re-ranked head names the query itself, which is not in its gallery")
    descriptors = _resident(descriptors, labels.device)
    asking = descriptors if queries is None else _resident(queries, labels.device)
    chosen = classes.blocks(classes.members > (-1 if neighbours and total > 1 else 1))
    blocks = ((rows, classes.positives(rows), rows[:, None]) for rows in chosen)
    return _ranked(asking, descriptors, blocks, labels, neighbours, total - 1, head, at, world)


@torch.no_grad()
def evaluate_queries(
    queries: Float[Tensor, "Q C"],
    gallery: Tensor | NDArray[Any],
    query_labels: Int64[Tensor, " Q"],
    gallery_labels: Int64[Tensor, " N"],
    neighbours: int = 10,
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    at: tuple[int, ...] = AT,
    world: World = ALONE,
) -> LabelledSetResult:
    """Rank a gallery for queries that are not in it; arguments as in `evaluate_labelled_set`.

    The rows of the result are the queries; its neighbours are rows of the gallery. A query without an image of its
    class in the gallery counts as none; a DistapError is raised if all are so.
    """
    require_head(head, len(queries), len(gallery))
    device = query_labels.device
    if not bool(torch.isin(query_labels, gallery_labels).any()):
        raise DistapError("no query has an image of its class in the gallery: there is nothing to retrieve")
    ascending, order = gallery_labels.sort(stable=True)
    ends = (torch.searchsorted(ascending, query_labels, right=right).tolist() for right in (False, True))
    own = [order.cpu().numpy()[start:end] for start, end in zip(*ends, strict=True)]
    chosen = torch.arange(len(queries), device=device).split(_height(len(gallery)))
    blocks = ((rows, padded([own[row] for row in rows.tolist()], device), rows[:, None][:, :0]) for rows in chosen)
    gallery = _resident(gallery, device)
    return _ranked(queries, gallery, blocks, query_labels, neighbours, len(gallery), head, at, world)


def _ranked(
    asking: Tensor | NDArray[Any],
    gallery: Tensor | NDArray[Any],
    blocks: Iterable[tuple[Tensor, Tensor, Tensor]],
    labels: Int64[Tensor, " N"],
    neighbours: int,
    others: int,
    head: Tensor | None,
    at: tuple[int, ...],
    world: World,
) -> LabelledSetResult:
    """Rank a gallery for blocks of queries: their rows, those of their positives, and those to ignore.

    Each block is one rank's. The others leave its rows zero, so the sums over the ranks are exact.
    """
    total, neighbours = len(labels), min(neighbours, others)
    precision, at_r = labels.new_zeros((2, total), dtype=torch.float64)
    first, curves = torch.zeros_like(labels), []
    hits, nearest = labels.new_zeros(total, len(at)), labels.new_zeros(total, neighbours)
    for number, (rows, positives, ignored) in enumerate(blocks):
        curves.append(precision.new_zeros(101))
        if number % world.size != world.rank:
            continue
        tiles = Tiles(_converted_rows(asking, rows), gallery, BLOCK_PAIRS)
        own_head = None if head is None else head[rows]
        if neighbours:
            nearest[rows] = best(tiles, ignored, own_head, neighbours)
        ranks = ranks_of_positives(negatives_before(tiles, positives, ignored, own_head), positives != NONE)
        precision[rows], at_r[rows], hits[rows] = _of_ranks(ranks, at)
        first[rows] = ranks[:, 0]
        curves[-1] += interpolated_precision(ranks[ranks[:, 0] > 0]).sum(0)
    precision, at_r, first, hits, nearest = map(world.sum, (precision, at_r, first, hits, nearest))
    is_query = first > 0
    precision, at_r = (values.masked_fill(~is_query, torch.nan) for values in (precision, at_r))
    curve = world.sum(torch.stack(curves)).sum(0) / is_query.sum()
    return LabelledSetResult(precision, at_r, first, nearest, curve, hits, others, at)


def decomposability_gap(
    descriptors: Tensor | NDArray[Any],
    labels: Int64[Tensor, " N"],
    batch: int,
    whole: float | None = None,
    world: World = ALONE,
) -> float:
    """By how much mAP within batches overstates mAP over the whole set (Ramzi et al. 2021, eq. 6).

    It is the mean over the batches of the mAP of each as a labelled set of its own, less the mAP of all images. It is
    positive, since a batch holds fewer negatives, and NaN if no batch holds two images of a class.

    Args:
        batch: images of each. Batches split the images at random, always alike; a remainder is in none.
        whole: mAP of all images, if it is known.
        world: ranks that share the work; all of them call this with the same arguments.
    """
    batch = min(batch, len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    batches = order[: len(order) - len(order) % batch].view(-1, batch)
    values = torch.zeros(2, len(batches), dtype=torch.float64)  # mAP, and whether there is one
    for number in range(world.rank, len(batches), world.size):
        rows = batches[number]
        own = labels[rows]
        if bool((own[own >= 0].unique(return_counts=True)[1] > 1).any()):
            described = descriptors[rows if isinstance(descriptors, Tensor) else rows.numpy()]
            values[0, number], values[1, number] = evaluate_labelled_set(described, own, 0).summary()["mAP"], 1
    if whole is None:
        whole = evaluate_labelled_set(descriptors, labels, 0, world=world).summary()["mAP"]
    found, counts = world.sum(values.to(world.device)).cpu()
    return float(found[counts > 0].mean()) - whole if counts.any() else float("nan")


def _of_ranks(ranks: Int64[Tensor, "q P"], at: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return AP, AP@R and the positives among the first k, for each k of `at`, of each query; NaN without any."""
    count, of_positives = (ranks > 0).sum(1), precision_at_positives(ranks)
    at_r = of_positives.masked_fill(ranks > count[:, None], 0).sum(1)
    hits = torch.stack([((ranks > 0) & (ranks <= k)).sum(1) for k in at], dim=1)
    return of_positives.sum(1) / count, at_r / count, hits


class _ClassMembers:
    """The images of each class of a labelled set."""

    def __init__(self, labels: Int64[Tensor, " N"]) -> None:
        self._by_class = labels.argsort(stable=True)
        _, self._class, counts = labels.unique(return_inverse=True, return_counts=True)
        self._start = counts.cumsum(0) - counts
        counts_of_classes = torch.where(labels[self._by_class[self._start]] < 0, 0, counts)
        self.members = counts_of_classes[self._class]  # (N,) size of the image's class, 0 without a class

    def blocks(self, chosen: Bool[Tensor, " N"]) -> Iterator[Int64[Tensor, " q"]]:
        """Yield blocks of the chosen images whose rankings fit into memory together, the greatest classes first."""
        order = self.members.argsort(descending=True, stable=True)
        order = order[chosen[order]]
        start = 0
        while start < len(order):
            # A dozen tables of ranks and places are as wide as the greatest number of positives.
            height = _height(max(len(self.members), 16 * int(self.members[order[start]])))
            yield order[start : start + height]
            start += height

    def positives(self, rows: Int64[Tensor, " q"]) -> Int64[Tensor, "q P"]:
        """The other images of the class of each row, padded with NONE."""
        count = self.members[rows, None]
        place = torch.arange(max(int(count.max()), 1), device=rows.device)
        found = self._by_class[(self._start[self._class[rows], None] + place).clamp(max=len(self._by_class) - 1)]
        return found.masked_fill((place >= count) | (found == rows[:, None]), NONE)


def _height(width: int) -> int:
    """Queries of a block whose tables are so wide: few enough for all ranks to have some, and the same on any."""
    return min(max(BLOCK_PAIRS // width, 1), MOST_QUERIES)


def _resident(descriptors: Tensor | NDArray[Any], device: torch.device) -> Tensor | NDArray[Any]:
    """A tensor on the device, unless an array is too large and has to be converted in blocks."""
    wide = descriptors.dtype in (torch.float64, "float64")
    like = torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=device)
    if not isinstance(descriptors, Tensor) and descriptors.size * 4 > RESIDENT_BYTES:
        return descriptors
    rows = converted(descriptors, like)
    require_finite(rows)
    return rows


def _converted_rows(descriptors: Tensor | NDArray[Any], rows: Int64[Tensor, " q"]) -> Tensor:
    if isinstance(descriptors, Tensor):
        return descriptors[rows]
    return converted(descriptors[rows.cpu().numpy()], torch.empty(0, device=rows.device))
