"""Compute losses that depend on similarities through soft histograms, in linear memory.

A pair of similarity s lies at t = (high - s) / width, counted in bins from the most similar end.
The triangular kernel of Revaud et al. (2019, eq. 7) touches two neighbouring bins, and its running
sum is a clamp: a pair adds clamp(m + 1 - t, 0, 1) to the cumulative count of bin m.

    t       up to m      m to m + 1      m + 1 and more
    adds       1          m + 1 - t            0

The loss depends on the similarities only through these counts, two tables of (b, M). Inside a bin
the counts are linear in s, so the loss's derivative by s is a lookup: the slope of (query, bin of
the pair, is it a positive).

Pass one goes over tiles of pairs and counts. Pass two goes over them again and looks slopes up; the
B x B similarities never exist at once. Pass one keeps each pair's bin as one byte if the budget
allows, so that pass two needs no product.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from distap.ranking import compiling
from distap.ranking.gathered import Gathered, QueryWeights
from distap.ranking.histogram.tiles import Images, SameClass, Tile, tiles
from distap.ranking.loss import (
    Budget,
    Counter,
    DescriptorRows,
    FlagRows,
    LabelRows,
    Loss,
    LossValue,
)

WINDOW = 6  # bins that a CPU counts at once: most tiles reach no more
Counts = Float64[Tensor, "b M"]  # cumulative soft counts of b queries in M bins
Pairs = Float[Tensor, "r c"]  # of a tile
# The place of each pair's slope in the table `by_code`, for M bin centres:
#
#     code    0 ... M - 2           M - 1               M ... 2 M - 2        2 M - 1
#     pair    negative in           negative before     positive in          positive
#             bin `code`            bin 0 or beyond     bin `code` - M       outside: slope 0
#                                   the last: slope 0
Codes = UInt8[Tensor, "r c"]


class Counted(NamedTuple):
    """A tile of pass one, and what pass two needs to know of it."""

    tile: Tile
    codes: Codes | None  # None: found again from the similarities
    # The pairs have the few codes from this one on, with which to compare; None: look codes up.
    first_code: int | None


@dataclass(frozen=True)
class HistogramLoss(Loss):
    """A mean over queries of 1 - a function of the query's soft counts in bins of similarity.

    A subclass writes `average_precision`, and autograd differentiates it by the counts.
    """

    bins: int = 20
    """Number of bin centres M, 2 to 128."""
    low: float = -1.0
    """Similarity of the last bin centre; smaller similarities count fully in the last bin."""
    high: float = 1.0
    """Similarity of the first bin centre."""
    self_pair: bool = True
    """Count a query among its own positives, like the papers' code."""
    weights: QueryWeights = "uniform"
    """Weigh all queries alike (uniform), or all classes (class)."""
    is_ap: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # A pair's bin and whether it is a positive are to fit into a byte.
        if not 2 <= self.centres <= 128:
            beyond = self.centres - self.bins
            raise ValueError(f"bins is {self.bins}; {2 - beyond} to {128 - beyond} are possible")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; low must be below high")

    @property
    def centres(self) -> int:
        return self.bins

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.centres - 1)

    @abstractmethod
    def average_precision(self, negatives: Counts, positives: Counts) -> Float64[Tensor, " b"]:
        """Return each query's AP from its soft counts, differentiable; 0 without positives."""

    def counter(self, pairs: int, budget: Budget) -> "Passes":
        return Passes(self, pairs, budget)

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        is_own = torch.isin(
            torch.arange(len(gathered.gallery), device=gathered.own.device), gathered.own
        )
        counter = self.counter(len(gathered.own) * len(gathered.gallery), budget)
        counter.add(gathered.gallery, gathered.gallery_labels.cpu(), is_own.cpu())
        # This counter has seen the rows in the gallery's own order.
        return counter.value_and_gradient(replace(gathered, arrival=None))


class Passes(Counter):
    """Count the pairs of this rank's queries, and turn the counts into the loss and its gradient.

    Images are added a part of the gallery at a time, as they arrive from the other ranks. The order
    of the tiles depends on the parts alone, so that a run that is repeated gives the same bits.
    """

    loss: HistogramLoss

    def __init__(self, loss: HistogramLoss, pairs: int, budget: Budget) -> None:
        super().__init__(loss, budget)
        is_cuda = budget.device.type == "cuda"
        self._window = loss.centres - 1 if is_cuda else WINDOW
        self._compiles = pairs >= compiling.PAYS_FROM_PAIRS * (compiling.ON_GPU if is_cuda else 1)
        # Own images of each part of the gallery, and the part's other images.
        self._parts: list[tuple[Images, Images]] = []
        self._tiles: list[Counted] = []
        self._pairs = 0  # that were counted
        # Negatives and positives of each own image at or above each bin but the last, which holds
        # all of them. Counts reach B: float32 within a tile and float64 between tiles stay exact up
        # to a million.
        self._counts = torch.zeros(
            2, 0, loss.centres - 1, dtype=torch.float64, device=budget.device
        )

    def add(self, descriptors: DescriptorRows, labels: LabelRows, is_own: FlagRows) -> None:
        """Count the pairs among the gallery's next images, and between them and earlier ones."""
        first_row = self._counts.shape[1]
        queries = Images.of(descriptors, labels, is_own, self.seen, first_row)
        remote = Images.of(descriptors, labels, ~is_own, self.seen, first_row)
        self._counts = pad(self._counts, (0, 0, 0, len(queries.labels)))
        for tile in self._new_tiles(queries, remote):
            self._count(tile)
        self._parts.append((queries, remote))
        super().add(descriptors, labels, is_own)

    def _fast(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return compiling.compiled(function) if self._compiles else function

    def _new_tiles(self, queries: Images, remote: Images) -> Iterator[Tile]:
        # The tiles of a new part. Pairs of two images of other ranks are those ranks' business.
        #
        #                        earlier     earlier    new         new
        #                        queries     remote     queries     remote
        #     earlier queries    (done)      (done)     b'          d
        #     new queries        b           c          a           d
        #
        # b' is b transposed: b is mirrored.
        for rows in (queries, *(earlier for earlier, _ in self._parts)):
            yield from tiles(queries, rows, self.budget, mirrored=True)  # a, b
            yield from tiles(rows, remote, self.budget, mirrored=False)  # d
        for _, earlier in self._parts:
            yield from tiles(queries, earlier, self.budget, mirrored=False)  # c

    def _count(self, tile: Tile) -> None:
        similarities = tile.similarities()
        same_class = tile.same_class()
        self._pairs += similarities.numel()
        codes = None
        if self._pairs <= self.budget.half:  # a byte for each
            codes = self._codes(tile, similarities, same_class)
        sides = [(tile, similarities, same_class)]
        if tile.mirrored:
            mirror = tile.mirror()
            sides.append((mirror, similarities.t(), same_class and mirror.same_class()))
        # A GPU is not waited for.
        lowest = self.loss.low if similarities.is_cuda else similarities.amin().item()
        # A side is counted twice: its positives, picked out by their columns, then all pairs with
        # -inf in their places, which lies beyond the last bin and counts nowhere.
        for side, values, columns in sides:
            if columns is not None:
                positives = self._positives(side, values, *columns)
                self._add_counts(self._counts[1, side.counts], positives, lowest)
        if same_class is not None:
            _add_in(similarities, *same_class, -torch.inf)
        for side, values, _ in sides:
            reached = self._add_counts(self._counts[0, side.counts], values, lowest)
        # On a CPU, to compare with few codes takes a third of the time of looking up. That needs
        # codes in a row: without positives, nor pairs before bin 0 and beyond the last.
        first_code = None
        if self._compiles and same_class is None and len(reached) <= WINDOW:
            first_code = reached.start or None
        self._tiles.append(Counted(tile, codes, first_code))

    def _add_counts(self, counts: Tensor, similarities: Tensor, lowest: float) -> range:
        """Add a tile's soft counts; return the bins that its pairs reach."""
        # Bins before the first that a pair of the tile reaches hold none of them, and those beyond
        # the last hold all.
        high = self.loss.high
        width = self.loss.width
        last = counts.shape[1]
        # In this order, min and max pass over NaN, for which a later check looks.
        highest = high if similarities.is_cuda else similarities.amax().item()
        begin = int(min(last - 1, max(0, (high - highest) / width)))
        reached = range(begin, ceil(min(last, max(begin, (high - lowest) / width) + 1)))
        for first in reached[:: self._window]:
            soft = self._fast(soft_counts)(
                similarities, high - first * width, width, self._window + 1
            )
            counts[:, first : first + self._window] += soft[:, : last - first]
        counts[:, first + self._window :] += soft[:, -1:]
        return reached

    def _positives(
        self, side: Tile, similarities: Tensor, columns: Tensor, is_counted: Tensor
    ) -> Tensor:
        if side.is_diagonal and not self.loss.self_pair:
            is_counted = is_counted & (
                columns != torch.arange(len(columns), device=columns.device)[:, None]
            )
        # Each pair is counted once, from one value of its similarity. The difference 'all minus
        # positives' would leave a rounding residue in bins without negatives, and with it a
        # gradient where there is no loss.
        return similarities.gather(1, columns).masked_fill_(~is_counted, -torch.inf)

    def _codes(self, tile: Tile, similarities: Pairs, same_class: SameClass) -> Codes:
        codes = self._fast(bin_codes)(
            similarities, self.loss.high, self.loss.width, self.loss.centres
        )
        if same_class is not None:
            _add_in(codes, *same_class, self.loss.centres)
        if tile.is_diagonal:
            # An image's similarity to itself is constant: its slope would only change the
            # descriptor's length.
            codes.fill_diagonal_(self.loss.centres - 1)
        return codes

    def value_and_gradient(self, gathered: Gathered) -> LossValue:
        # Remembered descriptors are not in the counts yet. They are no queries, so they only add
        # columns.
        remembered = gathered.gallery[self.seen :]
        labels = gathered.gallery_labels[self.seen :].cpu()
        if len(labels):
            self.add(remembered, labels, torch.zeros_like(labels, dtype=torch.bool))
        # From the order of counting, part by part and by class, to that of `gathered.own`.
        positions = torch.cat([queries.positions for queries, _ in self._parts])
        order = gathered.rows_of(positions).argsort()
        sizes = gathered.class_sizes[gathered.own, 0].double()
        totals = torch.stack([self.seen - sizes, sizes - float(not self.loss.self_pair)])
        # The last bin holds all pairs, whose number is known: it need not be counted, and no
        # similarity changes it.
        tables = [
            table.requires_grad_()
            for table in torch.cat([self._counts[:, order], totals[:, :, None]], dim=2)
        ]
        weight = gathered.query_weights(self.loss.weights)[gathered.own]
        # The loss of each query, and its derivative by a negative, then by a positive, in each of
        # the M - 1 bins. In bin m a pair of similarity s adds m + 1 - (high - s) / width to the
        # count of bin m, and a constant to the others: the slope by s is that by this count over
        # the width. Autograd sees (b, M) tables, never pairs.
        with torch.enable_grad():
            losses = 1 - self.loss.average_precision(*tables)
            by_count = torch.autograd.grad((weight * losses).sum(), tables)
        slopes = torch.cat([table[:, :-1] for table in by_count], dim=1) / self.loss.width
        # By code first: neighbours in a row are neighbouring columns of a tile, so that lookups on
        # a GPU coalesce.
        shared = gathered.share(slopes.to(gathered.gallery.dtype)).t().unflatten(0, (2, -1))
        # Zeros for pairs outside the bins, and for remembered images, which are no queries.
        by_code = pad(shared, (0, len(gathered.gallery) - shared.shape[2], 0, 1)).flatten(0, 1)
        loss = gathered.world.sum((weight * losses).sum())
        per_query = torch.where(weight > 0, losses, torch.nan)
        return LossValue(loss, per_query, self._gradient(by_code, gathered)[order])

    def _gradient(
        self, by_code: Float[Tensor, "codes N"], gathered: Gathered
    ) -> Float[Tensor, "b C"]:
        # Pass two. The similarity of i and j moves the counts of both as queries:
        #
        #     dL/dd_i = sum over j of (slope of query i for the pair + slope of query j for it) d_j
        #
        # Both slopes are lookups, once all ranks have shared their tables, (b, 2 M) each. So every
        # part of a descriptor's gradient comes from its own row of pairs, and no B x C values have
        # to be reduced over ranks.
        gradient = by_code.new_zeros(self._counts.shape[1], self._parts[0][0].descriptors.shape[1])
        by_images = {
            images: by_code[:, gathered.rows_of(images.positions)] for images in chain(*self._parts)
        }
        for tile, codes, first in self._tiles:
            if codes is None:
                codes = self._codes(tile, tile.similarities(), tile.same_class())
            looked_up = slice(first, None if first is None else first + WINDOW + 1)
            by_row = by_images[tile.queries][looked_up, tile.rows].t()
            by_column = by_images[tile.gallery][looked_up, tile.columns]
            slopes = self._fast(slope_of_pairs)(codes, by_row, by_column, first)
            gradient[tile.counts].addmm_(slopes, tile.gallery.descriptors[tile.columns])
            # The sum of both slopes is symmetric, so the mirror image needs no lookup of its own.
            if tile.mirrored:
                mirror = tile.mirror()
                gradient[mirror.counts].addmm_(slopes.t(), tile.queries.descriptors[tile.rows])
        # Their memory is free from now on.
        self._tiles = []
        self._parts = []
        return gradient


def _add_in(
    table: Tensor, columns: Int64[Tensor, "r P"], is_real: Bool[Tensor, "r P"], value: int | float
) -> None:
    """Add values at columns of each row, in place; padding repeats a column and adds nothing."""
    table.scatter_add_(1, columns, torch.where(is_real, value, 0).to(table.dtype))


def soft_counts(
    similarities: Pairs, high: float, width: float, bins: int
) -> Float[Tensor, "r slopes"]:
    """Return cumulative soft counts per row, in all bins but the last (Revaud et al. 2019, eq. 9).

    Pairs of -inf count nowhere.
    """
    # With t = (high - s) / width, a pair adds relu(m + 1 - t) - relu(m - t) to bin m:
    #
    #     1 |‾‾‾‾‾‾‾‾\
    #       |         \             of bin m, over t
    #     0 |__________\_____
    #             t = m  m + 1
    #
    # Each relu serves two bins, and unlike a clamp it is one operation when compiled. Rounded once
    # at a power of two, t loses no more digits, so that a pair of an earlier bin adds exactly 1.
    top = 2 ** bins.bit_length()
    from_top = top - ((high - similarities) / width).relu_()
    counts = from_top.new_empty(bins - 1, len(from_top))
    below = torch.zeros_like(from_top)
    # A bin at a time: uncompiled this stays in cache, and compiled all bins come from one reading.
    for m in range(1, bins):
        up_to = (from_top + (m - top)).relu_()
        counts[m - 1], below = below.sub_(up_to).sum(-1), up_to
    return -counts.t()


def bin_codes(similarities: Pairs, high: float, width: float, bins: int) -> Codes:
    """Return the bin of each pair, 0 to bins - 2, or bins - 1 outside the range."""
    t = (high - similarities) / width
    # Beyond the ends the counts are flat, and so is the loss: such a pair has slope 0.
    return torch.where(t < 0, bins - 1, t.clamp(0, bins - 1)).to(torch.uint8)


def slope_of_pairs(
    codes: Codes,
    by_row: Float[Tensor, "r codes"],
    by_column: Float[Tensor, "codes c"],
    first: int | None,
) -> Pairs:
    """Return the loss's derivative by each similarity: the row's slope plus the column's.

    The tables hold the slopes of all codes, or of a few codes from `first` on.
    """
    if first is None:
        index = codes.long()
        return by_row.gather(1, index) + by_column.gather(0, index)
    place = codes.int() - first
    of_row = by_row[:, :1]
    of_column = by_column[:1]
    for m in range(1, by_row.shape[1]):
        of_row = torch.where(place < m, of_row, by_row[:, m : m + 1])
        of_column = torch.where(place < m, of_column, by_column[m])
    return of_row + of_column
