"""Rank a gallery for the queries of a set, and compute figures from the ranks of positives."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from distap.retrieval.figures import GRADED, figures_named
from distap.retrieval.ranks import CONVERTED_NUMBERS, MANY_BOUNDS, Block, Ties, gallery_tiles
from distap.retrieval.row_blocks import Descriptors, on_device, require_same_dimensions, taken
from distap.retrieval.truth import NONE, Truth
from distap.world import ALONE, World

BLOCK_PAIRS = 2**25  # similarities held at once: 128 MB in float32
MOST_QUERIES = 512  # of a block
# Numbers of queries and their positives that are held at once, to be counted in one pass over the
# gallery.
HELD_NUMBERS = 2**25
# An array up to this size is converted to float32 once, a larger one again in every pass.
RESIDENT_BYTES = 2**30


@dataclass(frozen=True)
class Evaluated:
    """Retrieval figures of Q queries."""

    values: dict[str, Float64[Tensor, " Q"]]  # by figure; NaN for a query without a positive
    # queries of each part, by the name that comes before the figures'
    in_part: dict[str, Bool[Tensor, " Q"]]
    # rank, from 1, of the best positive; 0 for a query without any
    first_positive: Int64[Tensor, " Q"]
    positives: Int64[Tensor, " Q"]  # number of right images, of all grades
    neighbours: Int64[Tensor, "Q k"]  # the most similar images of the gallery, best first

    @property
    def left_out(self) -> int:
        """Return the number of queries without a positive, in the group with most."""
        return max(int(values.isnan().sum()) for values in self.values.values())

    def summary(self) -> dict[str, float]:
        """Return mean figures, 0 to 1: over all queries, over those of each part, and over parts.

        A mean over no queries is NaN.
        """
        means = {
            f"{part} {name}".strip(): float(values[is_in_part].nanmean())
            for part, is_in_part in self.in_part.items()
            for name, values in self.values.items()
        }
        for name in self.values if len(self.in_part) > 1 else ():
            of_parts = [means[f"{part} {name}"] for part in self.in_part if part]
            means[f"mean {name}"] = float(torch.tensor(of_parts, dtype=torch.float64).nanmean())
        return means


def figure_names(
    figures: Sequence[str], groups: Iterable[str], domains: Iterable[str] = ()
) -> list[str]:
    """Return the names of figures in `Evaluated.summary`, with those of groups and domains."""
    names = [name for name in figures if name in GRADED]  # not per group
    for group in groups:
        names += [f"{group} {name}".strip() for name in figures if name not in GRADED]
    prefixes = [*dict.fromkeys(["", *domains])]
    if len(prefixes) > 1:
        prefixes.append("mean")
    return [f"{prefix} {name}".strip() for prefix in prefixes for name in names]


@torch.no_grad()
def evaluate_descriptors(
    queries: Descriptors,
    gallery: Descriptors,
    truth: Truth,
    figures: Sequence[str],
    neighbours: int = 0,
    *,
    head: Int64[Tensor, "Q K"] | None = None,
    distractors: Descriptors | None = None,
    ties: Ties = "against",
    world: World = ALONE,
) -> Evaluated:
    """Rank the gallery for each query, in blocks of queries.

    Args:
        queries: (Q, C) of length 1, so that the dot product is the cosine; a tensor on any device,
            or an array, possibly a memory map of float16, which is read in blocks.
        gallery: (N, C), of the same kinds.
        figures: names, see `distap.retrieval.figures`.
        neighbours: number of most similar images of the gallery to report, distractors apart.
        head: rows that come first for each query, in this order, whatever their similarity;
            distractors from N.
        distractors: (M, C) further images, which are right for no query, read in blocks.
        ties: see `distap.retrieval.ranks`.
        world: ranks that share the work; all call this with the same arguments, and get the same
            bits as one.
    Raises:
        DistapError: a descriptor is not finite.
    """
    require_same_dimensions(queries, gallery)
    others = truth.gallery - (truth.own is not None)
    neighbours = min(neighbours, others)
    if distractors is not None:
        others += len(distractors)
    table = _FigureTable(truth, figures, others, neighbours)
    sides = _Sides(queries, gallery, truth, head, neighbours)
    for places_of_blocks in sides.passes():
        blocks = [sides.block(places, ties) for places in places_of_blocks]
        for block in blocks:
            block.start(sides.gallery, neighbours)
        for tile in gallery_tiles(blocks, sides.gallery, distractors, sides.is_mirrored, world):
            tile.count()
        for block in blocks:
            block.finish(world, sides.order if sides.is_mirrored else None)
            table.add(block)
    return table.evaluated()


class _Sides:
    """Queries and gallery on their device, and the order in which blocks of queries are ranked.

    A query's place is its index in `order`, its row the one that the caller gave it.
    """

    def __init__(
        self,
        queries: Descriptors,
        gallery: Descriptors,
        truth: Truth,
        head: Int64[Tensor, "Q K"] | None,
        neighbours: int,
    ) -> None:
        self._truth = truth
        self._head = head
        is_double = queries.dtype in (torch.float64, "float64")
        self._dtype = torch.float64 if is_double else torch.float32
        self.gallery = self._resident(gallery, "gallery descriptor")
        is_same = queries is gallery
        self._queries = self.gallery if is_same else self._resident(queries, "query")
        # Queries with as many positives stand together, so that their tables have little padding.
        counts = truth.counts[truth.order]
        self.order = truth.order[counts.argsort(descending=True, stable=True)]
        self.is_mirrored = is_same and head is None and self._can_mirror()
        if self.is_mirrored:
            # Sort the gallery as well, so that the queries of a block are also a range of columns.
            self.gallery = self._queries = self.gallery[self.order]
            # The place of each row. NONE, which is -1, indexes the last entry and so stays NONE.
            self._place_of_row = torch.cat([self.order.argsort(), self.order.new_tensor([NONE])])
        elif not neighbours:
            # Nothing is reported of a query without a positive. (Mirroring needs all as columns.)
            self.order = self.order[truth.counts[self.order] > 0]

    def _resident(self, descriptors: Descriptors, name: str) -> Descriptors:
        """Return a tensor on the truth's device.

        Leave an array so large that it must be converted in blocks.
        """
        if (
            not isinstance(descriptors, Tensor)
            and math.prod(descriptors.shape) * 4 > RESIDENT_BYTES
        ):
            return descriptors
        return on_device(descriptors[:], self._dtype, self._truth.device, name=name)

    def _can_mirror(self) -> bool:
        """Return whether half of the tiles suffices for a gallery that is its own queries.

        A tile then counts for the queries of two blocks, so one pass counts all queries, and their
        tables must fit into memory at once.
        """
        widest = int(self._truth.counts.max())
        return (
            self._truth.is_symmetric
            and isinstance(self.gallery, Tensor)
            and self.gallery.device.type == "cpu"  # a GPU is faster with wide tiles
            and widest <= MANY_BOUNDS
            and 4 * len(self.order) * (widest + 1) <= HELD_NUMBERS
        )

    def passes(self) -> Iterator[list[range]]:
        """Yield the blocks, as ranges of places, that one pass over the gallery counts.

        One pass counts many blocks, because each pass may read a gallery that is a file.
        """
        counts = self._truth.counts[self.order]  # descending
        images, dimensions = self.gallery.shape
        width = min(CONVERTED_NUMBERS // dimensions, images)
        blocks = list[range]()
        numbers = 0
        start = 0
        while start < len(counts):
            # Two things limit the height of a block: its tile is as wide as the columns that are
            # read at once, and the dozen tables (up to 16) that its figures take are as wide as the
            # most positives of a query.
            widest = int(counts[start])
            height = min(max(BLOCK_PAIRS // max(width, 16 * widest, 1), 1), MOST_QUERIES)
            # Until the end of the pass each query holds about four of the tables, and its
            # descriptor.
            held = height * (4 * widest + dimensions)
            if blocks and numbers + held > HELD_NUMBERS and not self.is_mirrored:
                yield blocks
                blocks = []
                numbers = 0
            blocks.append(range(start, min(start + height, len(counts))))
            numbers += held
            start += height
        if blocks:
            yield blocks

    def block(self, places: range, ties: Ties) -> Block:
        rows = self.order[places.start : places.stop]
        tables = self._truth.tables(rows)
        if self.is_mirrored:
            read = self._queries[places.start : places.stop]
            tables = tables._replace(
                positives=self._place_of_row[tables.positives],
                ignored=self._place_of_row[tables.ignored],
            )
        else:
            read = taken(self._queries, rows)
        queries = on_device(read, self._dtype, rows.device, name="query of a block, at place")
        head = rows.new_empty(len(rows), 0) if self._head is None else self._head[rows]
        return Block(places, rows, queries, tables, head, ties)


class _FigureTable:
    """Figures of all queries, which are computed block by block."""

    def __init__(self, truth: Truth, figures: Sequence[str], others: int, neighbours: int) -> None:
        """`others` is the number of images that each query is ranked against."""
        self._truth = truth
        self._others = others
        named = figures_named(figures)
        graded = {name: named.pop(name) for name in GRADED if name in named}
        # Prefix of the figures' names, grades that count (None for all), and the figures. Graded
        # figures take all grades into account, so they are computed once, not per group.
        self._groups = [
            ("", None, graded),
            *((prefix, grades, named) for prefix, grades in truth.groups.items()),
        ]
        counts = truth.counts
        unknown = counts.new_full(counts.shape, torch.nan, dtype=torch.float64)
        self._values = {
            f"{prefix} {name}".strip(): unknown.clone()
            for prefix, _, figures in self._groups
            for name in figures
        }
        self._first_positive = torch.zeros_like(counts)
        self._neighbours = counts.new_zeros(len(counts), neighbours)

    def add(self, block: Block) -> None:
        """Compute the figures of a block whose negatives are counted."""
        all_grades = block.ranked(self._others)
        self._first_positive[block.rows] = all_grades.ranks[:, 0]
        self._neighbours[block.rows] = block.nearest[1]
        for prefix, grades, figures in self._groups:
            if grades is None or block.tables.grades is None:
                ranked = all_grades
            elif self._truth.levels is None:
                # Positives of other grades are junk (Revisited Oxford: easy leaves out hard ones).
                ranked = block.ranked_alone(grades, self._others)
            else:
                # Positives of other grades are negatives: at a fine level, images of a coarser one.
                ranked = all_grades.among(grades)
            for name, figure in figures.items():
                self._values[f"{prefix} {name}".strip()][block.rows] = figure(ranked)

    def evaluated(self) -> Evaluated:
        counts = self._truth.counts
        parts = self._truth.parts or [""] * len(counts)
        in_part = {
            part: torch.tensor([part in ("", name) for name in parts], device=counts.device)
            for part in dict.fromkeys(["", *parts])
        }
        return Evaluated(self._values, in_part, self._first_positive, counts, self._neighbours)
