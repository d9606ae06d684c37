"""Rank each query's positives by counting the images before them, so that no gallery is sorted.

The rank of a positive is its place among the positives plus the number of negatives before it. The
similarities of the positives are computed first, and from them the bounds that negatives before
them reach. Then each tile of similarities (some queries by some gallery rows) is computed once, and
the negatives that reach each bound are counted in it. If the queries are the gallery, a tile counts
for its rows and, transposed, for its columns, so that half of the tiles suffices:

            c0  c1  c2
        b0  ■   ■   ■        tile (b0, c2) counts for the queries of b0, and for those of c2,
        b1      ■   ■        whose tile (b2, c0) it is, transposed
        b2          ■

Distractors, which are right for no query, follow the gallery as further columns.

A difference of similarities within the tie width is taken for rounding. A positive ranks after the
negatives that it ties with, or before them if asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distap.errors import TIE_WIDTH
from distap.retrieval.figures import Ranked
from distap.retrieval.row_blocks import Descriptors, on_device, taken
from distap.retrieval.truth import NONE, Tables
from distap.world import World

CONVERTED_NUMBERS = 2**24  # numbers of a gallery converted to float32 at once: 64 MB
FIRST = 2.0**60  # above all similarities; its first 2**24 multiples are exact in float32
# How `count_above` counts depends on the number of bounds per query, which is that of positives:
#
#     to FEW_BOUNDS     compare the whole tile with the first bounds, then with the second ones ...
#     to MANY_BOUNDS    on a CPU pick out the similarities that reach any bound, if they are rare;
#                       otherwise as above
#     beyond            on a CPU pick out as above, if they are rare; otherwise sort the tile
FEW_BOUNDS = 16
MANY_BOUNDS = 64
RARE_ONE_IN = 16  # similarities are rare if at most one in so many reaches a bound
# Width of the tiles that are compared once per bound, so that they stay in a CPU's cache.
CACHED_COLUMNS = 1024

# Whether ties count against the query (positives rank after the negatives that they tie with) or
# for it.
Ties = Literal["against", "for"]


@dataclass(eq=False)
class Block:
    """A block of queries that are ranked together, with their results so far."""

    places: range  # in the order of all queries; of mirrored tiles, rows of the sorted gallery
    rows: Int64[Tensor, " q"]  # numbers of the queries
    queries: Float[Tensor, "q C"]
    tables: Tables
    # gallery rows that come first, in this order, whatever their similarity
    head: Int64[Tensor, "q K"]
    ties: Ties
    similarities: Float[Tensor, "q P"] = field(init=False)  # of the positives; infinite for padding
    width: Float[Tensor, "q P"] = field(init=False)  # up to which others tie with them
    # a negative comes before a positive if it reaches the positive's bound; ascending, padded with
    # infinity
    bounds: Float[Tensor, "q P"] = field(init=False)
    order: Int64[Tensor, "q P"] = field(init=False)  # positives in the order of their bounds
    before: Int64[Tensor, "q P"] = field(init=False)  # negatives before each positive
    # from the first to the last gallery row that head, positives or ignored name: tiles outside
    # need no masking
    named: range = field(init=False)
    # similarities and rows of the nearest of the gallery, best first
    nearest: tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]] = field(init=False)

    def start(self, gallery: Descriptors, neighbours: int) -> None:
        """Compute the bounds of the positives, before any tile is counted."""
        self._compare_positives(gallery)
        positives = self.tables.positives
        size = self.head.shape[1]
        for place in range(size):
            self.similarities[positives == self.head[:, place, None]] = FIRST * (size - place)
        bounds = self.similarities + (-self.width if self.ties == "against" else self.width)
        bounds, order = bounds.masked_fill(positives == NONE, torch.inf).sort(dim=1)
        widest = max(int((positives != NONE).sum(1).max()), 1)
        self.bounds = bounds[:, :widest].contiguous()
        self.order = order[:, :widest].contiguous()
        self.before = torch.zeros_like(self.order)

        named = torch.cat([positives, self.tables.ignored, self.head], dim=1)
        named = named[named != NONE]
        self.named = range(int(named.min()), int(named.max()) + 1) if len(named) else range(0)
        similarities = bounds.new_full((len(bounds), neighbours), -torch.inf)
        self.nearest = similarities, similarities.long().zero_()

    def _compare_positives(self, gallery: Descriptors) -> None:
        """Compute the similarities of the positives, and up to which width others tie with them."""
        queries = self.queries
        positives = self.tables.positives
        # Queries come in the order of classes, so they share most of these rows. If NONE (-1) is
        # among them, row 0 is read in its place, and its similarities are not used.
        rows, place = positives.unique(return_inverse=True)
        self.similarities, self.width = queries.new_full((2, *positives.shape), torch.inf).unbind()
        epsilon = torch.finfo(queries.dtype).eps
        lengths = TIE_WIDTH * epsilon * torch.linalg.vector_norm(queries, dim=1, keepdim=True)
        height = max(CONVERTED_NUMBERS // queries.shape[1], 1)
        for start in range(0, len(rows), height):
            read = taken(gallery, rows[start : start + height].clamp(min=0))
            described = on_device(read, queries.dtype, queries.device, name="positive")
            is_here = (place >= start) & (place < start + len(described)) & (positives != NONE)
            query, number = is_here.nonzero(as_tuple=True)
            column = place[query, number] - start
            widths = lengths * torch.linalg.vector_norm(described, dim=1)
            self.similarities[query, number] = (queries @ described.t())[query, column]
            self.width[query, number] = widths[query, column]
        # A zero descriptor has no width; with this one, FIRST / width stays finite.
        self.width.clamp_(min=epsilon**2)

    def keep_nearest(self, similarities: Float[Tensor, "q n"], columns: range) -> None:
        """Update the nearest gallery rows from the similarities to the gallery rows `columns`."""
        old, old_rows = self.nearest
        neighbours = old.shape[1]
        # The tiles of a block come in the order of their rows, so of equal similarities the first
        # stays.
        (better,) = (similarities.amax(1) > old[:, -1]).nonzero(as_tuple=True)
        new, places = similarities[better].topk(min(neighbours, len(columns)), dim=1)
        old[better], old_rows[better] = _best(
            neighbours,
            torch.cat([old[better], new], dim=1),
            torch.cat([old_rows[better], places + columns.start], dim=1),
        )

    def finish(self, world: World, gallery_order: Int64[Tensor, " N"] | None) -> None:
        """Add up the counts of all ranks, and bring them into the order of the positives.

        Args:
            gallery_order: numbers of the gallery's images if it was sorted.
        """
        world.sum(self.before)
        before = torch.zeros_like(self.tables.positives)
        self.before = before.scatter_(1, self.order, self.before)
        similarities, rows = self.nearest
        if rows.shape[1]:
            count = len(rows)
            self.nearest = _best(
                rows.shape[1],
                world.gather_rows(similarities, world.size * count).view(count, -1),
                world.gather_rows(rows, world.size * count).view(count, -1),
            )
        if gallery_order is not None:
            self.nearest = self.nearest[0], gallery_order[self.nearest[1]]

    def ranked(self, others: int) -> Ranked:
        """Return the ranks of all positives, with their grades.

        Args:
            others: images that each query is ranked against.
        """
        exists = self.tables.positives != NONE
        return Ranked.by_negatives(self.before, exists, others, self._grades_by_rank())

    def ranked_alone(self, grades: Sequence[int], others: int) -> Ranked:
        """Return the ranks of the positives of some grades, as if the others were junk.

        `before` counts no positive of any grade, so those of other grades are just left out.
        """
        assert self.tables.grades is not None
        chosen = torch.isin(self.tables.grades, self.tables.grades.new_tensor([*grades]))
        return Ranked.by_negatives(self.before, chosen & (self.tables.positives != NONE), others)

    def _grades_by_rank(self) -> Int64[Tensor, "q P"] | None:
        """Return the positives' grades in the order of their similarities.

        The lower come first among ties.
        """
        if self.tables.grades is None:
            return None
        is_none = self.tables.positives == NONE
        grades = self.tables.grades.masked_fill(is_none, 0)
        order = grades.argsort(dim=1, stable=True, descending=self.ties == "for")
        widest = self.width.masked_fill(is_none, 0).amax(1, keepdim=True)
        # Counted in tie widths, ties become equal up to rounding, and the stable sort keeps their
        # order by grade.
        widths = (self.similarities / widest).round().masked_fill(is_none, -torch.inf)
        by_width = widths.gather(1, order).argsort(dim=1, stable=True, descending=True)
        return grades.gather(1, order.gather(1, by_width))


@dataclass(frozen=True, eq=False)
class GalleryTile:
    """Similarities of a block of queries to some columns, which are gallery rows or distractors."""

    block: Block
    columns: range  # distractors are numbered after the gallery
    is_of_gallery: bool  # distractors are not reported as nearest
    # the block whose queries are the columns, for which the transposed tile counts as well
    mirror: Block | None
    similarities: Float[Tensor, "q n"]
    scratch: Float[Tensor, " _"]  # q n numbers or more, to overwrite

    def count(self) -> None:
        """Count the negatives that reach the queries' bounds, and update the nearest rows.

        Overwrite the similarities.
        """
        block = self.block
        similarities = self.similarities
        columns = self.columns
        sides = [(block, similarities, columns)]
        if self.mirror is not None:
            sides.append((self.mirror, similarities.t(), block.places))

        is_named = columns.start < block.named.stop and block.named.start < columns.stop
        if is_named:
            query, place, column = _inside(block.head, columns)
            first = FIRST * (block.head.shape[1] - place).to(similarities.dtype)
            similarities[query, column] = first
            _mask(similarities, block.tables.ignored, columns)
        if self.is_of_gallery and block.nearest[1].shape[1]:
            for side, side_similarities, side_columns in sides:
                side.keep_nearest(side_similarities, side_columns)
        if is_named:
            _mask(similarities, block.tables.positives, columns)
        for side, side_similarities, _ in sides:
            side.before += count_above(side_similarities, side.bounds, self.scratch)


def gallery_tiles(
    blocks: Sequence[Block],
    gallery: Descriptors,
    distractors: Descriptors | None,
    is_mirrored: bool,
    world: World,
) -> Iterator[GalleryTile]:
    """Yield this rank's tiles; those of all ranks cover all pairs of a query and a column.

    Tiles are the same on any number of ranks, so their similarities are the same bits. A tile is
    valid until the next one is taken.

    Args:
        distractors: (M, C), numbered from N.
        is_mirrored: the queries of the blocks, one block after the other, are the gallery.
    """
    turns = cycle(range(world.size))  # ranks take the blocks of all strips in turn
    # Allocated once, since the system clears the memory that it gives.
    buffers = blocks[0].queries.new_empty(2, 0)
    for strip in _strips(blocks, gallery, distractors, is_mirrored):
        blocks_of_rank = [block for block in strip.blocks if next(turns) == world.rank]
        if not blocks_of_rank:
            continue
        columns = strip.columns
        read = strip.source[columns.start - strip.offset : columns.stop - strip.offset]
        like = blocks_of_rank[0].queries
        rows = on_device(read, like.dtype, like.device, columns.start, "gallery descriptor")
        for block in blocks_of_rank:
            # Where `count_above` passes over a tile once per bound, it is cut to fit a CPU's cache.
            # A mirrored one stays whole: its columns are all queries of the mirror.
            is_cut = (
                rows.device.type == "cpu"
                and block.bounds.shape[1] <= MANY_BOUNDS
                and strip.mirror is None
            )
            width = CACHED_COLUMNS if is_cut else len(columns)
            for start in range(0, len(columns), width):
                part = rows[start : start + width]
                size = len(block.rows) * len(part)
                if buffers.shape[1] < size:
                    buffers = like.new_empty(2, size)
                yield GalleryTile(
                    block,
                    columns[start : start + width],
                    strip.source is gallery,
                    # A tile on the diagonal holds each pair both ways already.
                    None if strip.mirror is block else strip.mirror,
                    torch.mm(block.queries, part.t(), out=buffers[0, :size].view(-1, len(part))),
                    buffers[1],
                )


class _Strip(NamedTuple):
    """Columns of similarities, read together from one source, and the queries to compare with."""

    source: Descriptors  # the gallery or the distractors
    offset: int  # column of the source's first row
    columns: range
    blocks: Sequence[Block]
    mirror: Block | None = None  # see `GalleryTile`


def _strips(
    blocks: Sequence[Block],
    gallery: Descriptors,
    distractors: Descriptors | None,
    is_mirrored: bool,
) -> Iterator[_Strip]:
    # Mirrored: the picture at the top of this file, column by column (c1 with b0 and b1).
    if is_mirrored:
        for number, block in enumerate(blocks):
            yield _Strip(gallery, 0, block.places, blocks[: number + 1], mirror=block)
    else:
        yield from _strips_of(gallery, 0, blocks)
    if distractors is not None:
        yield from _strips_of(distractors, len(gallery), blocks)


def _strips_of(source: Descriptors, offset: int, blocks: Sequence[Block]) -> Iterator[_Strip]:
    height = max(CONVERTED_NUMBERS // source.shape[1], 1)
    for start in range(0, len(source), height):
        stop = min(start + height, len(source))
        yield _Strip(source, offset, range(offset + start, offset + stop), blocks)


def _best(
    k: int, similarities: Float[Tensor, "q n"], rows: Int64[Tensor, "q n"]
) -> tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """Return the k greatest similarities and their rows; of equal similarities, the lowest rows."""
    order = rows.argsort(dim=1)
    by_similarity = similarities.gather(1, order).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, by_similarity[:, :k])
    return similarities.gather(1, order), rows.gather(1, order)


def _mask(similarities: Float[Tensor, "q n"], table: Int64[Tensor, "q _"], columns: range) -> None:
    """Set a tile's similarities to the gallery rows in `table` to minus infinity."""
    query, _, column = _inside(table, columns)
    similarities[query, column] = -torch.inf


def _inside(table: Int64[Tensor, "q _"], columns: range) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, place in the table and tile column of the rows that are among the columns."""
    query, place = ((table >= columns.start) & (table < columns.stop)).nonzero(as_tuple=True)
    return query, place, table[query, place] - columns.start


def count_above(
    similarities: Float[Tensor, "q n"], bounds: Float[Tensor, "q P"], scratch: Float[Tensor, " _"]
) -> Int64[Tensor, "q P"]:
    """Count the similarities of each row that reach each of its ascending bounds; 0 if infinite.

    Args:
        scratch: q n numbers or more, which are overwritten.
    """
    is_on_cpu = similarities.device.type == "cpu"
    if is_on_cpu and bounds.shape[1] > FEW_BOUNDS:
        counts = _count_rare(similarities.numpy(), bounds.numpy())
        if counts is not None:
            return torch.from_numpy(counts)
    if bounds.shape[1] > MANY_BOUNDS:
        if is_on_cpu:  # numpy sorts several times as fast
            ordered = torch.from_numpy(np.sort(similarities.numpy()))
        else:
            ordered = similarities.sort(dim=1).values
        return similarities.shape[1] - torch.searchsorted(ordered, bounds.contiguous())
    # Vectorised: a comparison that writes the compared type, with all three tensors in one order in
    # memory.
    reaches = scratch.as_strided(similarities.shape, similarities.stride())
    counts_by_place = [
        torch.ge(similarities, bound[:, None], out=reaches).sum(1)
        for bound in bounds.t().contiguous()
    ]
    return torch.stack(counts_by_place, dim=1).long()


def _count_rare(
    similarities: Float[np.ndarray, "q n"], bounds: Float[np.ndarray, "q P"]
) -> Int64[np.ndarray, "q P"] | None:
    """Count as `count_above`, by one pass over the similarities.

    Return None if more than one in RARE_ONE_IN reaches a bound of its row: then this is slow.
    """
    queries, columns = similarities.shape
    # In the order of memory, so that nothing is copied: that of a transposed tile is Fortran's.
    order: Literal["F", "C"] = "F" if similarities.strides[0] < similarities.strides[1] else "C"
    # Whatever reaches a bound of its row also reaches the first one, which is the lowest.
    places = np.flatnonzero((similarities >= bounds[:, :1]).ravel(order))
    if len(places) * RARE_ONE_IN > similarities.size:
        return None
    rows = places % queries if order == "F" else places // columns
    # Bounds ascend, so a similarity that reaches r of them reaches the first r. In a row with
    # three bounds:
    #
    #     r                                       0  1  2  3
    #     similarities that reach r bounds        0  4  2  1    counted by one bincount of all rows
    #     similarities that reach bound 1, 2, 3      7  3  1    their sums from the right
    reached = (similarities.ravel(order)[places] >= bounds.T[:, rows]).sum(0)
    width = bounds.shape[1] + 1
    counts = np.bincount(rows * width + reached, minlength=queries * width)
    from_right = counts.reshape(queries, width)[:, :0:-1].cumsum(1)
    return from_right[:, ::-1].copy()
