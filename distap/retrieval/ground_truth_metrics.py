"""Metrics of data sets with a ground truth file: Revisited Oxford and Paris, and Google Landmarks v2.

Revisited (Radenović et al. 2018) has three protocols. Junk is removed before ranks are counted:

    Easy     positives are the easy images              junk: also the hard ones
    Medium   positives are the easy and the hard images
    Hard     positives are the hard images              junk: also the easy ones

AP is the area under the precision-recall curve by trapezoids, as in the published evaluation. P@k is the share of
positives among the first min(k, rank of the last positive).

Google Landmarks v2 (Weyand et al. 2020): AP@100 is the sum of precision at the ranks of the positives among the first
100, divided by the number of positives, at most 100. P@10 is the share of positives among the first 10.

Queries without a positive are left out of the means and counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.ranks import (
    NONE,
    Tiles,
    negatives_before,
    padded,
    precision_at_positives,
    ranks_of_positives,
    require_finite,
    require_head,
)
from distap.world import ALONE, World

AT = (1, 5, 10)  # of Revisited: the k of P@k
SHOWN, FIRST = 100, 10  # of Google Landmarks: AP@100 and P@10
BLOCK_PAIRS = 2**27  # similarities held at once: 512 MB in float32, 70 queries against 1.9 million images


@dataclass(frozen=True)
class GradedQuery:
    """Gallery rows that are easy, hard or junk for a query of Revisited Oxford or Paris; the rest are negatives."""

    easy: tuple[int, ...]
    hard: tuple[int, ...]
    junk: tuple[int, ...]


@dataclass(frozen=True)
class LandmarkQuery:
    """Gallery rows that show a query's landmark, and the half of the queries that it belongs to."""

    positives: tuple[int, ...]
    usage: Literal["Public", "Private"]


@dataclass(frozen=True)
class GroundTruthResult:
    """Figures of Q queries."""

    summary: dict[str, float]  # means over the queries with a positive, from 0 to 1; NaN if there are none
    average_precision: dict[str, Float64[Tensor, " Q"]]  # by protocol; NaN for a query without a positive

    @property
    def left_out(self) -> dict[str, int]:
        """Number of queries without a positive, by protocol."""
        return {name: int(values.isnan().sum()) for name, values in self.average_precision.items()}


def graded_queries(records: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> list[GradedQuery]:
    """Queries from records of Revisited Oxford or Paris, and gallery rows by image name."""
    return [GradedQuery(*(_rows(record, grade, rows) for grade in ("easy", "hard", "junk"))) for record in records]


def landmark_queries(records: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> list[LandmarkQuery]:
    """Queries from the records of Google Landmarks v2, as `graded_queries`."""
    wrong = sorted({str(record["usage"]) for record in records} - {"Public", "Private"})
    if wrong:
        raise DistapError(f"the ground truth has queries of usage {', '.join(wrong)}; expected Public or Private")
    return [LandmarkQuery(_rows(record, "positives", rows), record["usage"]) for record in records]


@torch.no_grad()
def evaluate_graded(
    queries: Float[Tensor, "Q C"],
    gallery: Tensor | NDArray[Any],
    truth: Sequence[GradedQuery],
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    world: World = ALONE,
) -> GroundTruthResult:
    """Rank the gallery for each query once, for all three protocols of Revisited Oxford and Paris.

    Args:
        queries: of length 1.
        gallery: (N, C) of length 1; a tensor or an array, possibly a memory map of float16, which is read in blocks.
        truth: for each query.
        head: gallery rows that come first for each query, in this order, whatever their similarity.
        world: ranks that share the gallery; all call this with the same arguments, and get the same bits as one.
    Returns:
        Figures such as `Medium mAP` and `Hard mP@10`, and AP for `Easy`, `Medium` and `Hard`.
    """
    _require_fit(queries, gallery, [(*own.easy, *own.hard, *own.junk) for own in truth], head)
    device = queries.device
    easy, hard, junk = (padded([getattr(own, grade) for own in truth], device) for grade in ("easy", "hard", "junk"))
    positives = torch.cat([easy, hard], dim=1)
    before = negatives_before(Tiles(queries, gallery, BLOCK_PAIRS, world), positives, junk, head)
    is_easy = torch.arange(positives.shape[1], device=device) < easy.shape[1]
    exists = positives != NONE
    summary, by_protocol = {}, {}
    for name, own in (("Easy", exists & is_easy), ("Medium", exists), ("Hard", exists & ~is_easy)):
        ranks = ranks_of_positives(before, own)
        by_protocol[name] = _trapezoids(ranks)
        summary[f"{name} mAP"] = float(by_protocol[name].nanmean())
        last = ranks.amax(1) if ranks.shape[1] else ranks.sum(1)
        for k in AT:
            shown = last.clamp(max=k)
            precision = ((ranks > 0) & (ranks <= shown[:, None])).sum(1).double() / shown  # 0 / 0 is NaN
            summary[f"{name} mP@{k}"] = float(precision.nanmean())
    return GroundTruthResult(summary, by_protocol)


@torch.no_grad()
def evaluate_landmarks(
    queries: Float[Tensor, "Q C"],
    gallery: Tensor | NDArray[Any],
    truth: Sequence[LandmarkQuery],
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    world: World = ALONE,
) -> GroundTruthResult:
    """Rank the gallery for each query of Google Landmarks v2, in blocks of queries; arguments as `evaluate_graded`.

    Returns:
        mAP@100 and mP@10 of all queries, and with the prefixes `Public ` and `Private ` of both halves; `AP@100`.
    """
    _require_fit(queries, gallery, [own.positives for own in truth], head)
    height = max(BLOCK_PAIRS // len(gallery), 1)
    precision, first = [], []
    for start in range(0, len(queries), height):
        part = slice(start, start + height)
        positives = padded([own.positives for own in truth[part]], queries.device)
        tiles = Tiles(queries[part], gallery, BLOCK_PAIRS, world)
        before = negatives_before(tiles, positives, positives[:, :0], None if head is None else head[part])
        ranks = ranks_of_positives(before, positives != NONE)
        count = (ranks > 0).sum(1)
        found = precision_at_positives(ranks).masked_fill(ranks > SHOWN, 0).sum(1)
        precision.append(found / count.clamp(max=SHOWN))  # 0 / 0 is NaN
        hits = ((ranks > 0) & (ranks <= FIRST)).sum(1).double() / FIRST
        first.append(hits.masked_fill(count == 0, torch.nan))
    is_public = torch.tensor([own.usage == "Public" for own in truth], dtype=torch.bool, device=queries.device)
    summary = {}
    for name, chosen in {"": is_public | True, "Public ": is_public, "Private ": ~is_public}.items():
        summary[f"{name}mAP@{SHOWN}"] = float(torch.cat(precision)[chosen].nanmean())
        summary[f"{name}mP@{FIRST}"] = float(torch.cat(first)[chosen].nanmean())
    return GroundTruthResult(summary, {f"AP@{SHOWN}": torch.cat(precision)})


def _rows(record: Mapping[str, Any], grade: str, rows: Mapping[str, int]) -> tuple[int, ...]:
    names = dict.fromkeys(record[grade])
    missing = [name for name in names if name not in rows]
    if missing:
        raise DistapError(
            f"query {record['name']}: {len(missing)} of its {len(names)} {grade} images are not in the "
            f"gallery ({', '.join(missing[:3])}, ...); extract the gallery that the ground truth is for"
        )
    return tuple(rows[name] for name in names)


def _require_fit(
    queries: Tensor, gallery: Tensor | NDArray[Any], rows: Sequence[tuple[int, ...]], head: Tensor | None
) -> None:
    """Raise a DistapError unless truth and head name rows of the gallery, each once, and descriptors are finite."""
    if len(rows) != len(queries):
        raise DistapError(f"there is a truth for {len(rows)} queries and descriptors of {len(queries)}")
    for number, own in enumerate(rows):
        if len(set(own)) < len(own):
            raise DistapError(f"query {number}: the ground truth names an image twice")
        if own and not 0 <= min(own) <= max(own) < len(gallery):
            raise DistapError(f"query {number} names row {max(own)} of a gallery of {len(gallery)} images")
    require_head(head, len(queries), len(gallery))
    require_finite(queries, "the queries")
    if isinstance(gallery, Tensor):  # an array is checked while it is read
        require_finite(gallery, "the gallery")


def _trapezoids(ranks: Int64[Tensor, "Q P"]) -> Float64[Tensor, " Q"]:
    """AP of each query: the mean over its positives of the precision just before it and at it."""
    exists = ranks > 0
    place = torch.arange(ranks.shape[1], device=ranks.device).double()  # positives before this one
    from_zero = (ranks - 1).clamp(min=0)
    above = torch.where(from_zero > 0, place / from_zero.clamp(min=1), 1.0)  # 1 if nothing is before it
    heights = torch.where(exists, (above + (place + 1) / (from_zero + 1)) / 2, 0)
    return heights.sum(1) / exists.sum(1)  # 0 / 0 is NaN
