"""Rank each query's positives by counting the images before them, so that no gallery is sorted.

The rank of a positive is its place among the positives plus the number of negatives before it. The
similarities of the positives, the bounds, are computed first. Then each tile of similarities (some
queries by some gallery rows) is computed once, and the negatives above each bound are counted in
it. If the queries are the gallery, a tile counts for its rows and, transposed, for its columns, so
that half of the tiles suffice:

            c0  c1  c2
        b0  ■   ■   ■        tile (b0, c2) counts for the queries of b0, and for those of c2,
        b1      ■   ■        whose tile (b2, c0) it is, transposed
        b2          ■

Distractors, which are right for no query, follow the gallery as further columns.

A difference of similarities within the tie width is taken for rounding. A positive ranks after the
negatives that it ties with, or before them if asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distap.errors import TIE_WIDTH
from distap.retrieval.row_blocks import Descriptors, on_device, taken
from distap.retrieval.truth import NONE, Tables
from distap.world import World

CONVERTED_NUMBERS = 2**24  # numbers of a gallery converted to float32 at once: 64 MB
FIRST = 2.0**60  # above all similarities; its first 2**24 multiples are exact in float32
# bounds: a pass over the tile for each is fastest up to FEW, and up to MANY faster than sorting
FEW = 16
MANY = 64
# with more than FEW bounds, similarities that reach any are picked out if they are at most one in
# so many
RARE = 16
# of a tile that is passed over for each bound, so that it stays in a CPU's cache
CACHED_COLUMNS = 1024

# the query: positives rank after or before the negatives that they tie with
Ties = Literal["against", "for"]


@dataclass(eq=False)
class Block:
    """A block of queries that are ranked together, with their results so far."""

    rows: Int64[Tensor, " q"]  # numbers of the queries
    queries: Float[Tensor, "q C"]
    tables: Tables
    # gallery rows that come first, in this order, whatever their similarity
    head: Int64[Tensor, "q K"]
    similarities: Float[Tensor, "q P"] = field(init=False)  # of the positives; infinite for padding
    width: Float[Tensor, "q P"] = field(init=False)  # up to which others tie with them
    # that negatives before them reach, ascending; infinite: padding
    bounds: Float[Tensor, "q P"] = field(init=False)
    order: Int64[Tensor, "q P"] = field(init=False)  # positives in the order of their bounds
    before: Int64[Tensor, "q P"] = field(init=False)  # negatives before each positive
    named: range = field(init=False)  # gallery rows that head, positives and ignored are among
    # similarities and rows
    nearest: tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]] = field(init=False)

    def set_bounds(self, gallery: Descriptors, ties: Ties) -> None:
        """Compute the bound that negatives before a positive reach: its similarity, less or plus
        the tie width.
        """
        positives = self.tables.positives
        queries = self.queries
        # classes are in order, so most are shared
        columns, place = positives.unique(return_inverse=True)
        self.similarities, self.width = queries.new_full((2, *positives.shape), torch.inf).unbind()
        lengths = (
            TIE_WIDTH
            * torch.finfo(queries.dtype).eps
            * torch.linalg.vector_norm(queries, dim=1, keepdim=True)
        )
        height = max(CONVERTED_NUMBERS // queries.shape[1], 1)
        for start in range(0, len(columns), height):
            some = columns[start : start + height]
            part = on_device(
                taken(gallery, some.clamp(min=0)), queries.dtype, queries.device, 0, "positive"
            )
            is_here = (place >= start) & (place < start + len(some)) & (positives != NONE)
            query, number = is_here.nonzero(as_tuple=True)
            column = place[query, number] - start
            self.similarities[query, number] = (queries @ part.t())[query, column]
            self.width[query, number] = (lengths * torch.linalg.vector_norm(part, dim=1))[
                query, column
            ]
        named = torch.cat([positives, self.tables.ignored, self.head], dim=1)
        named = named[named != NONE]
        self.named = range(int(named.min()), int(named.max()) + 1) if len(named) else range(0)
        for number in range(most := self.head.shape[1]):
            self.similarities[positives == self.head[:, number, None]] = FIRST * (most - number)
        # of a zero descriptor; FIRST / width stays finite
        self.width.clamp_(min=torch.finfo(queries.dtype).eps ** 2)
        bounds = self.similarities + (-self.width if ties == "against" else self.width)
        most = max(int((positives != NONE).sum(1).max()), 1)
        found = bounds.masked_fill(positives == NONE, torch.inf).sort(dim=1)
        self.bounds, self.order = (own[:, :most].contiguous() for own in found)
        self.before = torch.zeros_like(self.order)

    def prepare(self, similarities: Float[Tensor, "q n"], span: range) -> None:
        """Make head rows rank first, and ignored rows last, in a tile of similarities to the rows
        of `span`.
        """
        query, place = _inside(self.head, span)
        first = FIRST * (self.head.shape[1] - place).to(similarities.dtype)
        similarities[query, self.head[query, place] - span.start] = first
        _mask(similarities, self.tables.ignored, span)

    def grades_by_rank(self, ties: Ties) -> Int64[Tensor, "q P"] | None:
        """Return the positives' grades in the order of their similarities; the lower come first
        among ties.
        """
        if self.tables.grades is None:
            return None
        grades = self.tables.grades.masked_fill(self.tables.positives == NONE, 0)
        order = grades.argsort(dim=1, stable=True, descending=ties == "for")
        is_none = self.tables.positives == NONE
        widest = self.width.masked_fill(is_none, 0).amax(1, keepdim=True)
        # Counted in tie widths, ties become equal up to rounding, and the stable sort keeps their
        # order by grade.
        widths = (self.similarities / widest).round().masked_fill(is_none, -torch.inf)
        order = order.gather(
            1, widths.gather(1, order).argsort(dim=1, stable=True, descending=True)
        )
        return grades.gather(1, order)

    def keep_nearest(
        self, similarities: Float[Tensor, "q n"], span: range, neighbours: int
    ) -> None:
        """Update the nearest gallery rows from a tile of similarities to the gallery rows of
        `span`.
        """
        # The tiles of a block come in the order of their rows, so of equal similarities the first
        # stays.
        (better,) = (similarities.amax(1) > self.nearest[0][:, -1]).nonzero(as_tuple=True)
        values, columns = similarities[better].topk(min(neighbours, len(span)), dim=1)
        new = zip(self.nearest, (values, columns + span.start), strict=True)
        best = _best(neighbours, *(torch.cat([old[better], found], dim=1) for old, found in new))
        for kept, found in zip(self.nearest, best, strict=True):
            kept[better] = found


def count_negatives(
    blocks: Sequence[Block],
    gallery: Descriptors,
    distractors: Descriptors | None,
    neighbours: int,
    ties: Ties,
    is_symmetric: bool,
    world: World,
) -> None:
    """Count the negatives before the positives of all blocks, and find the nearest rows of the
    gallery itself.

    Args:
        distractors: (M, C), numbered from N. is_symmetric: the blocks' queries, one block after the
            other, are the gallery. world: ranks that take tiles in turns. Tiles are the same on any
            number of ranks, so similarities are too.
    """
    for block in blocks:
        block.set_bounds(gallery, ties)
        nearest = block.bounds.new_full((len(block.rows), neighbours), -torch.inf)
        block.nearest = nearest, nearest.long().zero_()
    images = len(gallery)
    height = max(CONVERTED_NUMBERS // gallery.shape[1], 1)
    spans = [range(start, min(start + height, images)) for start in range(0, images, height)]
    if is_symmetric:
        ends = np.cumsum([len(block.rows) for block in blocks]).tolist()
        spans = [range(end - len(block.rows), end) for block, end in zip(blocks, ends, strict=True)]
    every = images + (0 if distractors is None else len(distractors))
    spans += [range(start, min(start + height, every)) for start in range(images, every, height)]
    turn = 0
    held = blocks[0].queries.new_empty(2, 0)
    for number, span in enumerate(spans):
        rows: Tensor | None = None
        is_half = is_symmetric and span.start < images
        for place, block in enumerate(blocks[: number + 1] if is_half else blocks):
            turn += 1
            if turn % world.size != world.rank:
                continue
            if rows is None:
                of, first = (
                    (gallery, 0)
                    if distractors is None or span.start < images
                    else (distractors, images)
                )
                read = of[span.start - first : span.stop - first]
                like = block.queries
                rows = on_device(read, like.dtype, like.device, span.start, "gallery descriptor")
            other = blocks[number] if is_half else block
            few = rows.device.type == "cpu" and block.bounds.shape[1] <= MANY and not is_half
            width = CACHED_COLUMNS if few else len(span)
            for start in range(0, len(span), width):
                part = rows[start : start + width]
                size = len(block.rows) * len(part)
                if held.shape[1] < size:  # allocated once, since the system clears what it gives
                    held = block.queries.new_empty(2, size)
                tile = torch.mm(block.queries, part.t(), out=held[0, :size].view(-1, len(part)))
                columns = range(span.start + start, span.start + start + len(part))
                sides = [
                    (block, tile, columns),
                    *([(other, tile.t(), spans[place])] if other is not block else []),
                ]
                is_named = columns.start < block.named.stop and block.named.start < columns.stop
                if is_named:
                    block.prepare(tile, columns)
                for own, similarities, others in (
                    sides if neighbours and span.start < images else ()
                ):
                    own.keep_nearest(similarities, others, neighbours)
                if is_named:
                    _mask(tile, block.tables.positives, columns)
                for own, similarities, _ in sides:
                    own.before += count_above(similarities, own.bounds, held[1])
    for block in blocks:
        world.sum(block.before)
        block.before = torch.zeros_like(block.tables.positives).scatter_(
            1, block.order, block.before
        )
        if neighbours:
            of_ranks = (
                world.gather_rows(own, world.size * len(own)).view(len(own), -1)
                for own in block.nearest
            )
            block.nearest = _best(neighbours, *of_ranks)


def _best(
    k: int, similarities: Float[Tensor, "q n"], rows: Int64[Tensor, "q n"]
) -> tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """Return the k greatest similarities and their gallery rows; of equal similarities, the lowest
    rows.
    """
    order = rows.argsort(dim=1)
    order = order.gather(
        1, similarities.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :k]
    )
    return similarities.gather(1, order), rows.gather(1, order)


def _mask(similarities: Float[Tensor, "q n"], table: Int64[Tensor, "q _"], span: range) -> None:
    """Set similarities to some gallery rows to minus infinity. Column j belongs to gallery row
    `span[j]`.
    """
    query, place = _inside(table, span)
    similarities[query, table[query, place] - span.start] = -torch.inf


def _inside(table: Int64[Tensor, "q _"], span: range) -> tuple[Tensor, Tensor]:
    query, place = ((table >= span.start) & (table < span.stop)).nonzero(as_tuple=True)
    return query, place


def count_above(
    similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"], scratch: Float[Tensor, " _"]
) -> Int64[Tensor, "q P"]:
    """Count a row's similarities that reach each bound (0 if infinite); overwrite `scratch`, q n
    numbers or more.

    The bounds of a row ascend.
    """
    is_on_cpu = similarities.device.type == "cpu"
    if is_on_cpu and bounds.shape[1] > FEW:
        found = _count_rare(similarities.numpy(), bounds.numpy())
        if found is not None:
            return torch.from_numpy(found)
    if bounds.shape[1] > MANY:  # on a CPU, numpy sorts several times as fast
        ordered = (
            torch.from_numpy(np.sort(similarities.numpy()))
            if is_on_cpu
            else similarities.sort(dim=1).values
        )
        return similarities.shape[1] - torch.searchsorted(ordered, bounds.contiguous())
    # Vectorised: a comparison that writes the compared type, with all three tensors in one order in
    # memory.
    is_above = scratch.as_strided(similarities.shape, similarities.stride())
    columns = bounds.t().contiguous()
    counts = [torch.ge(similarities, column[:, None], out=is_above).sum(1) for column in columns]
    return torch.stack(counts, dim=1).long()


def _count_rare(
    similarities: Float[np.ndarray, "q n"], bounds: Float[np.ndarray, "q P"]
) -> Int64[np.ndarray, "q P"] | None:
    """Count as `count_above`, by one pass over the similarities; None unless few of them reach
    their row's bounds.
    """
    is_reached = similarities >= bounds[:, :1]
    # then the columns lie one after the other
    is_transposed = similarities.strides[0] < similarities.strides[1]
    in_memory = (lambda one: one.T.ravel()) if is_transposed else np.ravel  # views
    places = np.flatnonzero(in_memory(is_reached))
    if len(places) * RARE > similarities.size:
        return None
    queries = similarities.shape[0]
    most = bounds.shape[1]
    rows = places % queries if is_transposed else places // similarities.shape[1]
    reached = (in_memory(similarities)[places] >= bounds.T[:, rows]).sum(0)  # of its row's bounds
    counts = np.bincount(rows * (most + 1) + reached, minlength=queries * (most + 1)).reshape(
        queries, most + 1
    )
    # Bounds ascend, so a similarity that reaches r of them reaches the first r: bound j counts all
    # with r above j.
    return counts[:, :0:-1].cumsum(1)[:, ::-1].copy()
