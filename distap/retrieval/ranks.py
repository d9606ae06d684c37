"""Where a query's positives rank, found by counting what comes before each, so that no gallery is sorted whole.

The rank of a positive is its place among the positives plus the number of negatives before it. Similarities are
made tile by tile: first the positives' own are taken out, then all others are held against them. Both passes see
the same numbers, bit by bit, so ties are decided by the rule asked for and never by rounding of another order.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError

Ties = Literal["pessimistic", "index"]
NONE = -1  # fills the rows of a table whose queries have different numbers of gallery images
CONVERTED_NUMBERS = 2**24  # of a gallery that are in float32 at once: 64 MB
FEW = 16  # positives up to which a pass over the similarities for each is faster than sorting them


class Tiles:
    """Similarities of q queries to N gallery images, some columns at a time.

    The tile that was computed last is kept: who asks for it again may find what was masked in it.

    Args:
        queries: of length 1, so that the dot product is the cosine.
        gallery: a tensor or an array, maybe a memory map of float16; it is converted by blocks.
        pairs: similarities of a tile.
    """

    def __init__(self, queries: Float[Tensor, "q C"], gallery: Tensor | NDArray[Any], pairs: int) -> None:
        if queries.shape[1] != gallery.shape[1]:
            raise DistapError(
                f"queries have {queries.shape[1]} dimensions and the gallery {gallery.shape[1]}: "
                "they were described by different networks"
            )
        self.dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
        self._queries, self._gallery = queries.to(self.dtype), gallery
        width = max(pairs // max(len(queries), 1), 1)
        self.spans = [range(start, min(start + width, len(gallery))) for start in range(0, len(gallery), width)]
        self._kept: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[range, Tensor]]:
        return ((span, self[number]) for number, span in enumerate(self.spans))

    def __getitem__(self, number: int) -> Float[Tensor, "q n"]:
        """Similarities to the gallery images of `spans[number]`."""
        if self._kept is None or self._kept[0] != number:
            self._kept = None  # its memory is free before the next one takes as much
            self._kept = number, self._similarities(self.spans[number])
        return self._kept[1]

    def _similarities(self, span: range) -> Tensor:
        result = self._queries.new_empty(len(self._queries), len(span))
        height = max(CONVERTED_NUMBERS // self._gallery.shape[1], 1)
        for start in range(span.start, span.stop, height):
            stop = min(start + height, span.stop)
            rows = converted(self._gallery[start:stop], self._queries, f"rows {start} to {stop - 1} of the gallery")
            torch.mm(self._queries, rows.t(), out=result[:, start - span.start : stop - span.start])
        return result


def converted(rows: Tensor | NDArray[Any], like: Tensor, what: str = "the descriptors") -> Tensor:
    """Descriptors in the type and on the device of others; those of arrays are looked through.

    Raises:
        DistapError: one is not finite.
    """
    if isinstance(rows, Tensor):
        return rows.to(like.device, like.dtype)
    # Memory maps are read-only, which torch warns of; a copy is not.
    part = torch.from_numpy(np.array(rows)).to(like.device, like.dtype)
    require_finite(part, what)
    return part


def require_finite(descriptors: Float[Tensor, "n C"], what: str = "the descriptors") -> None:
    """Raise a DistapError where one is not finite."""
    # A sum is finite where all its terms are, and is made without a table of answers.
    if not bool(descriptors.sum(dtype=torch.float64).isfinite()):
        lost = int((~descriptors.isfinite().all(1)).sum())
        raise DistapError(
            f"{what}: {lost} of {len(descriptors)} descriptors are not finite: the network is broken, "
            "nothing can be ranked"
        )


def negatives_before(
    tiles: Tiles,
    positives: Int64[Tensor, "q P"],
    ignored: Int64[Tensor, "q I"],
    ties: Ties = "pessimistic",
    head: Int64[Tensor, "q K"] | None = None,
) -> Int64[Tensor, "q P"]:
    """Gallery images before each positive that are neither positive nor ignored.

    Args:
        tiles: similarities; what is positive, ignored or in the head is masked in the last one.
        positives: gallery rows of each query, NONE where it has fewer.
        ignored: gallery rows that are taken out, such as junk and the query itself, NONE where it has fewer.
        ties: `pessimistic`, a positive comes after the negatives that are as similar; or `index`, the smaller
            gallery row comes first.
        head: gallery rows that come first, in this order, whatever their similarity.
    Returns:
        Counts, 0 where `positives` is NONE.
    """
    bounds = torch.full(positives.shape, torch.inf, dtype=tiles.dtype, device=positives.device)
    for number, span in enumerate(tiles.spans):
        query, place = _inside(positives, span)
        if len(query):
            bounds[query, place] = tiles[number][query, positives[query, place] - span.start]
    in_head, before = _places_in_head(positives, ignored, head)
    bounds[in_head] = torch.inf
    for span, similarities in tiles:
        mask(similarities, span, positives, ignored, *(() if head is None else (head,)))
        before += _count_before(similarities, span, positives, bounds, ties)
    return before


def mask(similarities: Float[Tensor, "q n"], span: range, *rows: Int64[Tensor, "q _"]) -> None:
    """Set the similarities to some gallery rows to minus infinity; `span` are the rows of the columns."""
    for table in rows:
        query, place = _inside(table, span)
        similarities[query, table[query, place] - span.start] = -torch.inf


def ranks_of_positives(before: Int64[Tensor, "q P"], exists: Bool[Tensor, "q P"]) -> Int64[Tensor, "q P"]:
    """Ranks, from 1 and ascending, from the number of negatives before each positive; 0 behind the last."""
    last = torch.iinfo(torch.int64).max
    ascending = before.masked_fill(~exists, last).sort(dim=1).values
    place = torch.arange(1, before.shape[1] + 1, device=before.device)
    return torch.where(ascending < last, ascending + place, 0)


def precision_at_positives(ranks: Int64[Tensor, "q P"]) -> Float64[Tensor, "q P"]:
    """Precision at the rank of each positive, 0 behind the last."""
    place = torch.arange(1, ranks.shape[1] + 1, device=ranks.device).double()
    return torch.where(ranks > 0, place / ranks.clamp(min=1), 0)


def interpolated_precision(ranks: Int64[Tensor, "q P"]) -> Float64[Tensor, "q 101"]:
    """Greatest precision at any recall of at least r, for r = 0, 0.01 ... 1, of queries that have a positive."""
    count = (ranks > 0).sum(dim=1, keepdim=True)
    greatest_behind = precision_at_positives(ranks).flip(1).cummax(dim=1).values.flip(1)
    # Recall r needs r x count positives, rounded up; in whole numbers, since 0.07 x 100 is more than 7.
    needed = (torch.arange(101, device=ranks.device) * count + 99) // 100
    return greatest_behind.gather(1, needed.clamp(min=1) - 1)


def padded(rows: Sequence[Sequence[int] | NDArray[Any]], device: torch.device) -> Int64[Tensor, "q most"]:
    """One table of gallery rows from a list for each query, filled with NONE."""
    table = np.full((len(rows), max(map(len, rows), default=0)), NONE, dtype=np.int64)
    for number, own in enumerate(rows):
        table[number, : len(own)] = own
    return torch.from_numpy(table).to(device)


def require_rankable(
    queries: Float[Tensor, "Q C"], gallery: Tensor | NDArray[Any], head: Int64[Tensor, "Q K"] | None
) -> None:
    """Raise a DistapError where a descriptor is not finite, or the head is none of these queries and gallery."""
    require_head(head, len(queries), len(gallery))
    require_finite(queries, "the queries")
    if isinstance(gallery, Tensor):  # an array is looked through when it is read
        require_finite(gallery, "the gallery")


def require_head(head: Int64[Tensor, "Q K"] | None, queries: int, gallery: int) -> None:
    """Raise a DistapError where the first places of a ranking are not different rows of the gallery."""
    if head is None:
        return
    ascending = head.sort(dim=1).values
    if len(head) != queries or not bool(((head >= 0) & (head < gallery)).all()):
        raise DistapError(
            f"a re-ranked head is {tuple(head.shape)}; expected {queries} rows of numbers below {gallery}"
        )
    if bool((ascending[:, 1:] == ascending[:, :-1]).any()):
        raise DistapError("a re-ranked head names a gallery image twice for one query")


def _inside(table: Tensor, span: range) -> tuple[Tensor, Tensor]:
    query, place = ((table >= span.start) & (table < span.stop)).nonzero(as_tuple=True)
    return query, place


def _places_in_head(positives: Tensor, ignored: Tensor, head: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which positives are in the head, and the negatives before each that it holds."""
    in_head = torch.zeros_like(positives, dtype=torch.bool)
    before = torch.zeros_like(positives)
    if head is None:
        return in_head, before
    for query in range(len(positives)):
        negative = ~torch.isin(head[query], torch.cat([positives[query], ignored[query]]))
        exists = positives[query] != NONE
        # A positive that the head lacks comes after all of its negatives.
        before[query] = torch.where(exists, negative.sum(), 0)
        place, own = (head[query][:, None] == positives[query][None]).nonzero(as_tuple=True)
        in_head[query, own] = True
        before[query, own] = negative.cumsum(0)[place]
    return in_head, before


def _count_before(similarities: Tensor, span: range, positives: Tensor, bounds: Tensor, ties: Ties) -> Tensor:
    if ties == "pessimistic":
        return count_above(similarities, bounds, torch.zeros_like(bounds, dtype=torch.bool))
    # Columns before the positive's own come first when as similar, columns behind it only when more.
    counts = count_above(similarities, bounds, positives < span.stop)
    for query, place in zip(*(part.tolist() for part in _inside(positives, span)), strict=True):
        column = int(positives[query, place]) - span.start
        counts[query, place] += (similarities[query, :column] == bounds[query, place]).sum()
    return counts


def count_above(
    similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"], strictly: Bool[Tensor, "q P"]
) -> Int64[Tensor, "q P"]:
    """How many of a row's similarities are above each bound, or equal to it unless strictly; 0 for infinity."""
    if similarities.device.type != "cpu":
        return count_above_in_columns(similarities, bounds, strictly)
    result = np.zeros(bounds.shape, dtype=np.int64)
    rows = zip(similarities.numpy(), bounds.numpy(), strictly.numpy(), result, strict=True)
    # On a CPU a row at a time, which then stays in the cache.
    for row, own, more, counts in rows:
        (finite,) = np.isfinite(own).nonzero()
        if len(finite) > FEW:
            ascending = np.sort(row)
            sides = (np.searchsorted(ascending, own[finite], side) for side in ("right", "left"))
            counts[finite] = len(row) - np.where(more[finite], *sides)
        else:
            for place in finite:
                above = row > own[place] if more[place] else row >= own[place]
                counts[place] = np.count_nonzero(above)
    return torch.from_numpy(result)


def count_above_in_columns(
    similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"], strictly: Bool[Tensor, "q P"]
) -> Int64[Tensor, "q P"]:
    """The same as `count_above`, for all rows together."""
    if bounds.shape[1] > FEW:
        ascending, bounds = similarities.sort(dim=1).values, bounds.contiguous()
        right, left = (torch.searchsorted(ascending, bounds, side=side) for side in ("right", "left"))
        return similarities.shape[1] - torch.where(strictly, right, left)
    counts = torch.zeros_like(bounds, dtype=torch.int64)
    for place in range(bounds.shape[1]):
        own, more = bounds[:, place : place + 1], strictly[:, place : place + 1]
        counts[:, place] = ((similarities > own) | ((similarities == own) & ~more)).sum(dim=1)
    return counts
