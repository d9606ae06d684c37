"""Rank a query's positives by counting the images before each, so that no gallery is sorted.

The rank of a positive is its place among the positives plus the number of negatives before it. Similarities are
computed tile by tile (some columns of the gallery, all queries), in two passes:

    pass 1   read the similarity of each positive, its bound
    pass 2   count, in each tile, the negatives above each bound

Both passes compute bit-identical similarities, so rounding decides no tie. A positive ranks after the negatives of
equal similarity.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.row_blocks import on_device
from distap.retrieval.truth import NONE
from distap.world import ALONE, World

CONVERTED_NUMBERS = 2**24  # numbers of a gallery converted to float32 at once: 64 MB
FIRST = 2.0**60  # above all similarities; its first 2**24 multiples are exact in float32
FEW = 16  # up to this many positives, one pass over the similarities for each is faster than sorting them


class Tiles:
    """Similarities of q queries to N gallery images, in blocks of columns.

    The last tile is kept, so reading it again is free and shows what was masked in it. The gallery may be a memory
    map of float16, which is converted in blocks; `pairs` is the number of similarities in a tile. Of several ranks
    that share a gallery, each takes some of its blocks. Blocks are the same on any number of ranks, so similarities
    are too. The gallery rows of a head come first, in its order, whatever their similarity: they are given greater
    ones.
    """

    def __init__(
        self,
        queries: Float[Tensor, "q C"],
        gallery: Tensor | NDArray[Any],
        pairs: int,
        head: Int64[Tensor, "q K"] | None = None,
        world: World = ALONE,
    ) -> None:
        if queries.shape[1] != gallery.shape[1]:
            raise DistapError(
                f"queries have {queries.shape[1]} dimensions and the gallery {gallery.shape[1]}: another network's?"
            )
        self.dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
        self._queries, self._gallery, self._head, self.world = queries.to(self.dtype), gallery, head, world
        width = max(pairs // max(len(queries), 1), 1)
        self._height = min(max(CONVERTED_NUMBERS // gallery.shape[1], 1), width)  # rows of a block
        blocks, width = -(-len(gallery) // self._height), width - width % self._height
        first, stop = (
            min(rank * blocks // world.size * self._height, len(gallery)) for rank in (world.rank, world.rank + 1)
        )
        self.spans = [range(start, min(start + width, stop)) for start in range(first, stop, width)]
        self._kept: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[range, Tensor]]:
        return ((span, self[number]) for number, span in enumerate(self.spans))

    def __getitem__(self, number: int) -> Float[Tensor, "q n"]:
        """Return similarities to the gallery images of `spans[number]`."""
        if self._kept is None or self._kept[0] != number:
            self._kept = None  # free its memory before the next tile takes as much
            self._kept = number, self._similarities(self.spans[number])
        return self._kept[1]

    def _similarities(self, span: range) -> Tensor:
        result = self._queries.new_empty(len(self._queries), len(span))
        for start in range(span.start, span.stop, self._height):
            stop = min(start + self._height, span.stop)
            part, device = self._gallery[start:stop], self._queries.device
            rows = on_device(part, self.dtype, device, start, "gallery descriptor")
            torch.mm(self._queries, rows.t(), out=result[:, start - span.start : stop - span.start])
        if self._head is not None:
            query, place = _inside(self._head, span)
            before_others = FIRST * (self._head.shape[1] - place).to(self.dtype)
            result[query, self._head[query, place] - span.start] = before_others
        return result


def negatives_before(
    tiles: Tiles,
    positives: Int64[Tensor, "q P"],
    ignored: Int64[Tensor, "q I"],
) -> Int64[Tensor, "q P"]:
    """Count the gallery images before each positive that are neither positive nor ignored; 0 without a positive.

    Of ranks that share the gallery, each counts in its tiles; all call this, and all get the sums.

    Args:
        tiles: similarities. Positives and ignored images stay masked in the last tile.
        positives: gallery rows of each query, padded with NONE.
        ignored: gallery rows to remove, such as junk and the query itself, padded with NONE.
    """
    bounds = torch.zeros(positives.shape, dtype=tiles.dtype, device=positives.device)
    for number, span in enumerate(tiles.spans):
        query, place = _inside(positives, span)
        if len(query):
            bounds[query, place] = tiles[number][query, positives[query, place] - span.start]
    bounds = tiles.world.sum(bounds)  # one rank has read each of them
    bounds[positives == NONE] = torch.inf
    before = torch.zeros_like(positives)
    for span, similarities in tiles:
        _mask(similarities, span, positives, ignored)
        before += count_above(similarities, bounds)
    return tiles.world.sum(before)


def best(tiles: Tiles, ignored: Int64[Tensor, "q _"], k: int) -> Int64[Tensor, "q k"]:
    """Return the k most similar gallery images that are not ignored."""
    parts = []
    for span, similarities in tiles:
        _mask(similarities, span, ignored)
        values, columns = similarities.topk(min(k, len(span)), dim=1)
        parts.append((values, columns + span.start))
    values, found = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return found.gather(1, values.topk(k, dim=1).indices)


def _mask(similarities: Float[Tensor, "q n"], span: range, *rows: Int64[Tensor, "q _"]) -> None:
    """Set similarities to some gallery rows to minus infinity. Column j belongs to gallery row `span[j]`."""
    for table in rows:
        query, place = _inside(table, span)
        similarities[query, table[query, place] - span.start] = -torch.inf


def ranks_of_positives(before: Int64[Tensor, "q P"], exists: Bool[Tensor, "q P"]) -> Int64[Tensor, "q P"]:
    """Turn the negatives before each positive into ranks from 1, ascending and padded with 0."""
    last = torch.iinfo(torch.int64).max
    ascending = before.masked_fill(~exists, last).sort(dim=1).values
    place = torch.arange(1, before.shape[1] + 1, device=before.device)
    return torch.where(ascending < last, ascending + place, 0)


def _inside(table: Tensor, span: range) -> tuple[Tensor, Tensor]:
    query, place = ((table >= span.start) & (table < span.stop)).nonzero(as_tuple=True)
    return query, place


def count_above(similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"]) -> Int64[Tensor, "q P"]:
    """Count a row's similarities that reach each bound; 0 for an infinite bound."""
    if similarities.device.type != "cpu":
        return count_above_in_columns(similarities, bounds)
    result = np.zeros(bounds.shape, dtype=np.int64)
    # On a CPU, one row at a time stays in the cache.
    for row, own, counts in zip(similarities.numpy(), bounds.numpy(), result, strict=True):
        (finite,) = np.isfinite(own).nonzero()
        if len(finite) > FEW:
            counts[finite] = len(row) - np.searchsorted(np.sort(row), own[finite])
        else:
            for place in finite:
                counts[place] = np.count_nonzero(row >= own[place])
    return torch.from_numpy(result)


def count_above_in_columns(similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"]) -> Int64[Tensor, "q P"]:
    """Compute `count_above` for all rows at once, which suits a GPU."""
    if bounds.shape[1] > FEW:
        return similarities.shape[1] - torch.searchsorted(similarities.sort(dim=1).values, bounds.contiguous())
    counts = torch.zeros_like(bounds, dtype=torch.int64)
    for place in range(bounds.shape[1]):
        counts[:, place] = (similarities >= bounds[:, place : place + 1]).sum(dim=1)
    return counts
