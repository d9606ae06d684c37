"""Losses that see the similarities through soft histograms only, in linear memory.

A pair of similarity s falls at t = (high - s) / width, counted in bins from the most similar end. The triangular
kernel of Revaud et al. (2019, eq. 7) touches two neighbouring bins, and its running sum is a clamp: a pair adds
clamp(m + 1 - t, 0, 1) to the cumulative count of bin m. The loss depends on the similarities only through these
counts, two tables of (B, M), and inside a bin the counts are linear in s. So the derivative by a similarity is
a lookup: the slope of (query, bin of the pair, is it a positive).

Two passes over tiles of pairs follow, one to count and one to look slopes up; the B x B similarities never exist
at once. Three things make them fast:
- similarities are symmetric, so of a rank's own images only the tiles on and above the diagonal are needed;
- the first pass keeps each pair's bin as one byte where the budget allows, so that the second needs no product;
- images are sorted by class, so that positives lie in narrow blocks and are told from negatives only there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.compiled import compiled_if_large
from distap.ranking.gathered import Gathered
from distap.ranking.protocol import LossValue
from distap.ranking.weights import class_sizes

# AP of each query from its cumulative soft counts of negatives and of positives: (b, M), (b, M) -> (b,).
AveragePrecisionOfCounts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Histogram:
    """Where the bins are, and who is counted.

    Args:
        bins: number of bin centres M, at least 2.
        low, high: similarities of the last and the first bin centre; the end bins are flat outside them.
        self_pair: whether a query counts itself among its positives.
    """

    bins: int
    low: float
    high: float
    self_pair: bool

    def __post_init__(self) -> None:
        # A pair's bin and whether it is a positive are to fit into a byte.
        if not 2 <= self.bins <= 128:
            raise ValueError(f"bins is {self.bins}; 2 to 128 are possible")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; low must be below high")

    @property
    def width(self) -> float:
        """Similarity between two neighbouring bin centres."""
        return (self.high - self.low) / (self.bins - 1)


def value_and_gradient(
    histogram: Histogram,
    average_precision: AveragePrecisionOfCounts,
    weights: Float64[Tensor, " B"],
    gathered: Gathered,
    budget: Budget,
) -> LossValue:
    """1 - AP, the weighted mean over queries, and its gradient (Revaud et al. 2019, section 3.1).

    Args:
        histogram: the bins.
        average_precision: the loss's formula.
        weights: of the queries; they sum to 1, and a query without positive has none.
        gathered: the batch.
        budget: memory that may be used.
    """
    passes = _Passes(histogram, gathered, budget)
    negatives, positives = passes.count()
    weight = weights[gathered.own]
    precision, slopes = loss_slopes(average_precision, negatives, positives, weight, histogram.width)
    loss = gathered.world.sum((weight * (1 - precision)).sum())
    per_query = torch.where(weight > 0, 1 - precision, torch.nan)
    return LossValue(loss, per_query, passes.gradient(slopes))


def loss_slopes(
    average_precision: AveragePrecisionOfCounts,
    negatives: Float64[Tensor, "b M"],
    positives: Float64[Tensor, "b M"],
    weights: Float64[Tensor, " b"],
    width: float,
) -> tuple[Float64[Tensor, " b"], Float64[Tensor, "b two_slopes"]]:
    """AP of each query, and the loss's derivative by a similarity in each of the M - 1 bins.

    Returns:
        (b,) AP, and (b, 2 (M - 1)) slopes: those of negatives first, then those of positives.
    """
    with torch.inference_mode(False), torch.enable_grad():
        tables = [table.clone().requires_grad_() for table in (negatives, positives)]
        precision = average_precision(*tables)
        by_count = torch.autograd.grad((weights.clone() * (1 - precision)).sum(), tables)
    # The last cumulative count is the number of pairs: no similarity changes it.
    return precision.detach(), torch.cat([table[:, :-1] for table in by_count], dim=1) / width


@dataclass(frozen=True)
class _Tile:
    """Own images `rows` against `columns`, both in the order of `_Passes`."""

    rows: slice
    columns: slice
    same_class: slice  # among the columns, those from the first to the last of a class of the rows; may be empty
    mirrored: bool  # whether it stands for its mirror image beyond the diagonal as well


class _Passes:
    """The two passes. Rows are this rank's images by class; columns are they, then the rest by class."""

    def __init__(self, histogram: Histogram, gathered: Gathered, budget: Budget) -> None:
        self.histogram, self.gathered, self.budget = histogram, gathered, budget
        labels, own = gathered.gallery_labels, gathered.own
        self.rows = own[labels[own].argsort(stable=True)]
        others = torch.ones_like(labels, dtype=torch.bool)
        others[own] = False
        rest = others.nonzero().flatten()
        order = torch.cat([self.rows, rest[labels[rest].argsort(stable=True)]])
        self.order = order
        self.gallery, self.labels = gathered.gallery[order], labels[order]
        self.same_class_ends = self._same_class_ends()
        pairs = len(self.rows) * len(order)
        self.soft_counts = compiled_if_large(soft_counts, pairs, self.gallery, _kernel_of_counts(self.gallery))
        self.bin_codes = compiled_if_large(bin_codes, pairs, self.gallery)
        self.slope_of_pairs = compiled_if_large(slope_of_pairs, pairs, self.gallery)
        self.codes: list[UInt8[Tensor, "r c"]] | None = None
        if budget.keeps(sum(_length(tile.rows) * _length(tile.columns) for tile in self._tiles())):
            self.codes = []

    def _same_class_ends(self) -> list[list[tuple[int, int]]]:
        """For own columns, then for the others: where each row's class begins and ends."""
        b = len(self.rows)
        mine = self.labels[:b].contiguous()
        ends = []
        for first, labels in ((0, mine), (b, self.labels[b:].contiguous())):
            begin = torch.searchsorted(labels, mine) + first
            end = torch.searchsorted(labels, mine, right=True) + first
            ends.append(list(zip(begin.tolist(), end.tolist(), strict=True)))
        return ends

    def _tiles(self) -> Iterator[_Tile]:
        """The diagonal and what is right of it among own images, then own images against all others."""
        b, N = len(self.rows), len(self.order)
        itemsize = self.gallery.element_size()
        # Twice as wide as high: the matrix product is fastest on tiles that are about square.
        height = max(1, int((self.budget.pairs(itemsize) / 2) ** 0.5))
        for rows in _strips(0, b, height):
            width = self.budget.columns(_length(rows), itemsize)
            yield self._tile(rows, rows, mirrored=False)
            for columns in _strips(rows.stop, b, width):
                yield self._tile(rows, columns, mirrored=True)
            for columns in _strips(b, N, width):
                yield self._tile(rows, columns, mirrored=False)

    def _tile(self, rows: slice, columns: slice, mirrored: bool) -> _Tile:
        ends = self.same_class_ends[0 if columns.start < len(self.rows) else 1]
        begin = max(ends[rows.start][0], columns.start)
        end = min(ends[rows.stop - 1][1], columns.stop)
        return _Tile(rows, columns, slice(begin, max(begin, end)), mirrored)

    def count(self) -> tuple[Float64[Tensor, "b M"], Float64[Tensor, "b M"]]:
        """First pass: cumulative soft counts of the negatives and of the positives of each own query."""
        soft = torch.zeros(2, len(self.rows), self.histogram.bins - 1, dtype=torch.float64, device=self.rows.device)
        negatives, positives = soft
        for tile in self._tiles():
            similarities = self._similarities(tile)
            if self.codes is not None:
                self.codes.append(self._codes(tile, similarities))
            if tile.same_class.start < tile.same_class.stop:
                inside, same_class, counted = self._positive_pairs(tile)
                # Each pair is counted once, from one value. The difference 'all minus positives' would leave a
                # rounding residue in bins without negatives.
                of_positives = similarities[:, inside].masked_fill(~counted, -torch.inf).contiguous()
                self._add_counts(positives, of_positives, tile.rows, tile.same_class, tile.mirrored)
                similarities[:, inside] = similarities[:, inside].masked_fill(same_class, -torch.inf)
            self._add_counts(negatives, similarities, tile.rows, tile.columns, tile.mirrored)
        same_class = class_sizes(self.gathered)[self.rows].double()
        return (
            self._with_total(negatives, len(self.order) - same_class),
            self._with_total(positives, same_class - float(not self.histogram.self_pair)),
        )

    def _add_counts(
        self, table: Float64[Tensor, "b slopes"], similarities: Tensor, rows: slice, columns: slice, mirrored: bool
    ) -> None:
        histogram = self.histogram
        table[rows] += self.soft_counts(similarities, histogram.high, histogram.width, histogram.bins)
        if mirrored:
            mirror = similarities.t().contiguous()
            table[columns] += self.soft_counts(mirror, histogram.high, histogram.width, histogram.bins)

    def _with_total(self, soft: Float64[Tensor, "b slopes"], total: Float64[Tensor, " b"]) -> Float64[Tensor, "b M"]:
        """The counts with their last column, which is the number of pairs, whatever their similarity."""
        return self._in_order_of_own(torch.cat([soft, total[:, None]], dim=1))

    def _in_order_of_own(self, rows: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        in_order = torch.empty_like(rows)
        in_order[torch.searchsorted(self.gathered.own, self.rows)] = rows
        return in_order

    def gradient(self, slopes: Float64[Tensor, "b two_slopes"]) -> Float[Tensor, "b C"]:
        """Second pass: dL/dd_i = sum over j of (slope of i for the pair + slope of j for the pair) d_j.

        A descriptor's gradient as a query and as others' gallery image both come from its own row: nothing has
        to be reduced over ranks. What a cross-batch memory remembers queries nothing, so its slopes are zero.
        """
        by_column = self._slopes_of_columns(slopes)
        by_row = by_column[:, : len(self.rows)].t().contiguous()
        gradient = torch.zeros_like(self.gallery[: len(self.rows)])
        for number, tile in enumerate(self._tiles()):
            codes = self.codes[number] if self.codes is not None else self._codes(tile, self._similarities(tile))
            by_similarity = self.slope_of_pairs(codes, by_row[tile.rows], by_column[:, tile.columns].contiguous())
            gradient[tile.rows].addmm_(by_similarity, self.gallery[tile.columns])
            if tile.mirrored:
                gradient[tile.columns].addmm_(by_similarity.t(), self.gallery[tile.rows])
        return self._in_order_of_own(gradient)

    def _slopes_of_columns(self, slopes: Float64[Tensor, "b two_slopes"]) -> Float[Tensor, "codes N"]:
        """Slopes by code and column: those of negatives by bin, 0, those of positives by bin, 0."""
        M = self.histogram.bins
        shared = self.gathered.share(slopes.to(self.gallery.dtype))
        negative, positive = shared.split(M - 1, dim=1)
        table = shared.new_zeros(2 * M, len(self.order))
        table[: M - 1, : len(shared)] = negative.t()
        table[M : 2 * M - 1, : len(shared)] = positive.t()
        return table[:, self.order]

    def _similarities(self, tile: _Tile) -> Float[Tensor, "r c"]:
        return self.gallery[tile.rows] @ self.gallery[tile.columns].t()

    def _positive_pairs(self, tile: _Tile) -> tuple[slice, Bool[Tensor, "r w"], Bool[Tensor, "r w"]]:
        """Where in the tile to look, the pairs of one class there, and those that count as positives."""
        first = tile.columns.start
        inside = slice(tile.same_class.start - first, tile.same_class.stop - first)
        same_class = self.labels[tile.rows, None] == self.labels[None, tile.same_class]
        counted = same_class if self.histogram.self_pair else same_class & ~self._self_pairs(tile)
        return inside, same_class, counted

    def _self_pairs(self, tile: _Tile) -> Bool[Tensor, "r w"]:
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=self.rows.device)
        columns = torch.arange(tile.same_class.start, tile.same_class.stop, device=self.rows.device)
        return rows[:, None] == columns[None]

    def _codes(self, tile: _Tile, similarities: Float[Tensor, "r c"]) -> UInt8[Tensor, "r c"]:
        """Where each pair's slope stands in the table: M - 1, a zero, for a pair that no similarity moves."""
        histogram = self.histogram
        codes: Tensor = self.bin_codes(similarities, histogram.high, histogram.width, histogram.bins)
        if tile.same_class.start < tile.same_class.stop:
            inside, same_class, _ = self._positive_pairs(tile)
            codes[:, inside] += same_class * histogram.bins
            if tile.rows == tile.columns:
                # An image's similarity to itself is constant: its slope would only change the descriptor's length.
                codes.fill_diagonal_(histogram.bins - 1)
        return codes


def _kernel_of_counts(gallery: Tensor) -> Callable[..., Tensor] | None:
    if not gallery.is_cuda or gallery.dtype != torch.float32:
        return None
    try:
        from distap.ranking import triton_kernels  # which only PyTorch's builds for GPUs can import
    except ImportError:
        return None
    return triton_kernels.soft_counts


def _strips(start: int, stop: int, width: int) -> Iterator[slice]:
    """Cut a range in parts of about the same size, none wider than `width`."""
    parts = -(-(stop - start) // width)
    cuts = [start + part * (stop - start) // max(parts, 1) for part in range(parts + 1)]
    yield from map(slice, cuts[:-1], cuts[1:])


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def soft_counts(
    similarities: Float[Tensor, "r c"], high: float, width: float, bins: int
) -> Float[Tensor, "r slopes"]:
    """Cumulative soft counts of each row in all bins but the last (Revaud et al. 2019, eq. 9); none for -inf."""
    from_high = (similarities - high) / width
    counts, soft = from_high.new_empty(bins - 1, len(from_high)), torch.empty_like(from_high)
    # A bin at a time, in place: uncompiled this stays in cache, and compiled all bins come from one reading.
    for m in range(1, bins):
        counts[m - 1] = soft.copy_(from_high).add_(m).clamp_(0, 1).sum(-1)
    return counts.t()


def bin_codes(similarities: Float[Tensor, "r c"], high: float, width: float, bins: int) -> UInt8[Tensor, "r c"]:
    """The bin of each pair, 0 to bins - 2; bins - 1 where its similarity lies outside the range."""
    t = (high - similarities) / width
    return torch.where(t < 0, bins - 1, t.clamp(0, bins - 1)).to(torch.uint8)


def slope_of_pairs(
    codes: UInt8[Tensor, "r c"], by_row: Float[Tensor, "r codes"], by_column: Float[Tensor, "codes c"]
) -> Float[Tensor, "r c"]:
    """The loss's derivative by each similarity: the slope of the row's query and that of the column's."""
    index = codes.long()
    return by_row.gather(1, index) + by_column.gather(0, index)
