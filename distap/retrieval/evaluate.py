"""Rank a gallery for the queries of a set, and compute figures from the ranks of positives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from distap.retrieval.figures import GRADED, Ranked, figures_named
from distap.retrieval.ranks import CONVERTED_NUMBERS, MANY, Block, Ties, count_negatives
from distap.retrieval.row_blocks import Descriptors, on_device, require_same_dimensions, taken
from distap.retrieval.truth import NONE, Truth
from distap.world import ALONE, World

BLOCK_PAIRS = 2**25  # similarities held at once: 128 MB in float32
MOST_QUERIES = 512  # of a block
# of the queries and their positives that are counted in one pass over the gallery
HELD_NUMBERS = 2**25
# a gallery up to this size is converted once, a larger one for every block of queries
RESIDENT_BYTES = 2**30


@dataclass(frozen=True)
class Evaluated:
    """Retrieval figures of Q queries."""

    values: dict[str, Float64[Tensor, " Q"]]  # by figure; NaN for a query without a positive
    # queries of each part, by the name that comes before the figures'
    in_part: dict[str, Bool[Tensor, " Q"]]
    # rank, from 1, of the best positive; 0 for a query without any
    first_positive: Int64[Tensor, " Q"]
    neighbours: Int64[Tensor, "Q k"]  # the most similar images of the gallery, best first

    @property
    def left_out(self) -> int:
        """Return the number of queries without a positive, in the group with most."""
        return max(int(values.isnan().sum()) for values in self.values.values())

    def summary(self) -> dict[str, float]:
        """Return mean figures, 0 to 1, over all queries, over each part, and over the parts; NaN
        without queries.
        """
        found = {
            f"{part} {name}".strip(): float(values[chosen].nanmean())
            for part, chosen in self.in_part.items()
            for name, values in self.values.items()
        }
        for name in self.values if len(self.in_part) > 1 else ():
            of_parts = [found[f"{part} {name}"] for part in self.in_part if part]
            found[f"mean {name}"] = float(torch.tensor(of_parts, dtype=torch.float64).nanmean())
        return found


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
        gallery: (N, C), of the same kinds. figures: names, see `figures`. neighbours: number of
            most similar images of the gallery to report, distractors apart. head: rows that come
            first for each query, in this order, whatever their similarity; distractors from N.
            distractors: (M, C) further images, which are right for no query, read in blocks. ties:
            see `ranks`. world: ranks that share the work; all call this with the same arguments,
            and get the same bits as one.
    Raises:
        DistapError: a descriptor is not finite.
    """
    counts = truth.counts
    total = len(truth.counts)
    computed = figures_named(figures)
    graded = {name: computed.pop(name) for name in GRADED if name in computed}
    require_same_dimensions(queries, gallery)
    others = truth.gallery - (truth.own is not None)
    is_same = queries is gallery
    dtype = torch.float64 if queries.dtype in (torch.float64, "float64") else torch.float32
    gallery = _resident(gallery, dtype, counts.device, "gallery descriptor")
    queries = gallery if is_same else _resident(queries, dtype, counts.device, "query")
    neighbours, others = (
        min(neighbours, others),
        others + (0 if distractors is None else len(distractors)),
    )
    # least padding in blocks
    order = truth.order[counts[truth.order].argsort(descending=True, stable=True)]
    # A half of the tiles suffices only if all queries are counted in one pass, since a tile counts
    # for queries of two blocks. So the tables of all queries must fit into memory at once, as the
    # last condition asks.
    is_symmetric = (
        truth.is_symmetric
        and is_same
        and head is None
        and isinstance(gallery, Tensor)
        and gallery.device.type == "cpu"  # a GPU is faster with wide tiles
        and int(counts.max()) <= MANY
        and 4 * total * (int(counts.max()) + 1) <= HELD_NUMBERS
    )
    if is_symmetric:
        gallery = queries = gallery[order]
    elif not neighbours:
        order = order[counts[order] > 0]
    names = [*graded, *(f"{group} {name}".strip() for group in truth.groups for name in computed)]
    values = {name: counts.new_zeros(total, dtype=torch.float64) for name in names}
    first = torch.zeros_like(counts)
    nearest = counts.new_zeros(total, neighbours)
    # The inverse of `order`: the row to which each image has moved, if the gallery is sorted like
    # the queries.
    place = order.argsort()
    for passed in filter(
        None, _passes(counts[order], len(gallery), gallery.shape[1], is_symmetric)
    ):
        blocks = []
        for some in passed:
            rows = order[some]
            tables = truth.tables(rows)
            if is_symmetric:
                positives, ignored = (
                    torch.where(own == NONE, own, place[own]) for own in (tables[0], tables[2])
                )
                tables = tables._replace(positives=positives, ignored=ignored)
            chosen = queries[some] if is_symmetric else taken(queries, rows)
            asking = on_device(chosen, dtype, rows.device, 0, "query of a block, at place")
            blocks.append(
                Block(
                    rows,
                    asking,
                    tables,
                    rows.new_empty(len(rows), 0) if head is None else head[rows],
                )
            )
        count_negatives(blocks, gallery, distractors, neighbours, ties, is_symmetric, world)
        for block in blocks:
            rows = block.rows
            grades = block.tables.grades
            before = block.before
            exists = block.tables.positives != NONE
            of_ranks = block.grades_by_rank(ties)
            every = Ranked.by_negatives(before, exists, others, of_ranks)
            first[rows] = every.ranks[:, 0]
            if neighbours:
                nearest[rows] = order[block.nearest[1]] if is_symmetric else block.nearest[1]
            for name, figure in graded.items():
                values[name][rows] = figure(every)
            for group, right in truth.groups.items():
                ranked = every
                if right is not None and grades is not None and truth.levels is not None:
                    ranked = every.among(right)
                elif right is not None and grades is not None:
                    # `before` counts no positive of any grade, so those of other grades are left
                    # out, like junk.
                    chosen = torch.isin(grades, grades.new_tensor([*right])) & exists
                    ranked = Ranked.by_negatives(before, chosen, others)
                for name, figure in computed.items():
                    values[f"{group} {name}".strip()][rows] = figure(ranked)
    values = {name: own.masked_fill(counts == 0, torch.nan) for name, own in values.items()}
    parts = truth.parts or [""] * total
    in_part = {
        part: torch.tensor([part in ("", own) for own in parts], device=counts.device)
        for part in dict.fromkeys(["", *parts])
    }
    return Evaluated(values, in_part, first, nearest)


def _passes(
    counts: Int64[Tensor, " Q"], images: int, dimensions: int, is_one: bool
) -> list[list[slice]]:
    """Return the blocks of queries that are counted together in each pass over the gallery.

    Args:
        counts: positives of each query, descending.
        images, dimensions: of the gallery.
        is_one: there is a single pass.
    """
    found = [list[slice]()]
    held = 0
    start = 0
    span = min(CONVERTED_NUMBERS // dimensions, images)
    while start < len(counts):
        # A dozen tables of ranks and places are as wide as the greatest number of positives.
        most = int(counts[start])
        height = min(max(BLOCK_PAIRS // max(span, 16 * most, 1), 1), MOST_QUERIES)
        numbers = height * (4 * most + dimensions)
        if found[-1] and held + numbers > HELD_NUMBERS and not is_one:
            found.append([])
            held = 0
        found[-1].append(slice(start, min(start + height, len(counts))))
        held, start = held + numbers, start + height
    return found


def _resident(
    descriptors: Descriptors, dtype: torch.dtype, device: torch.device, what: str
) -> Descriptors:
    """Return a tensor on the device, except for an array so large that it must be converted in
    blocks.
    """
    is_large = (
        not isinstance(descriptors, Tensor) and math.prod(descriptors.shape) * 4 > RESIDENT_BYTES
    )
    return descriptors if is_large else on_device(descriptors[:], dtype, device, 0, what)
