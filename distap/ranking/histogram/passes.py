"""The two passes over tiles of pairs: one counts, one looks slopes up.

Images are added a part of the gallery at a time, as they arrive from the other ranks; the pairs of the new ones
with each other and with all before are counted then. A whole batch is one part. In which order, and by which tiles,
depends on the parts alone and not on when they come, so that a run that is repeated gives the same bits.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.compiled import compiled_if_large
from distap.ranking.gathered import Gathered
from distap.ranking.histogram.loss import Histogram, bin_codes, slope_of_pairs, soft_counts
from distap.ranking.histogram.tiles import Images, Tile, rectangle, triangle
from distap.ranking.weights import class_sizes


class Passes:
    """Soft counts of this rank's queries, and from their slopes the gradient of its descriptors.

    Args:
        histogram: the bins.
        queries, gallery: greatest numbers of this rank's images, and of all.
        like: has the dtype and device of the descriptors.
        budget: memory that may be used.
    """

    def __init__(self, histogram: Histogram, queries: int, gallery: int, like: Tensor, budget: Budget) -> None:
        self.histogram, self.budget = histogram, budget
        self.own: list[Images] = []  # of each part
        self.rest: list[Images] = []
        self.seen = 0  # images of the gallery
        self._tiles: list[tuple[Tile, UInt8[Tensor, "r c"] | None]] = []  # with the bins of their pairs, where kept
        self._kept_bytes = 0
        soft = torch.zeros(2, queries, histogram.bins - 1, dtype=torch.float64, device=like.device)
        self._negatives, self._positives = soft
        pairs = queries * gallery
        self._soft_counts = compiled_if_large(soft_counts, pairs, like, _kernel_of_counts(like))
        self._bin_codes = compiled_if_large(bin_codes, pairs, like)
        self._slope_of_pairs = compiled_if_large(slope_of_pairs, pairs, like)

    def add(self, descriptors: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], is_own: Bool[Tensor, " n"]) -> None:
        """First pass over the pairs of the gallery's next images, with each other and with those before.

        Args:
            descriptors, labels: of the images.
            is_own: which are this rank's, its next queries.
        """
        labels, is_own = labels.cpu(), is_own.cpu()
        own = Images.of(descriptors, labels, is_own, self.seen, sum(map(len, self.own)))
        rest = Images.of(descriptors, labels, ~is_own, self.seen)
        for tile in self._new_tiles(own, rest):
            self._count(tile)
        self.own.append(own)
        self.rest.append(rest)
        self.seen += len(labels)

    def _new_tiles(self, own: Images, rest: Images) -> Iterator[Tile]:
        yield from triangle(own, self.budget)
        for earlier in self.own:
            yield from rectangle(own, earlier, self.budget, mirrored=True)
        for others in (*self.rest, rest):
            yield from rectangle(own, others, self.budget, mirrored=False)
        for earlier in self.own:
            yield from rectangle(earlier, rest, self.budget, mirrored=False)

    def _count(self, tile: Tile) -> None:
        similarities = tile.similarities()
        height, width = tile.shape
        kept = None
        if self.budget.keeps(self._kept_bytes + height * width):
            kept = self._codes(tile, similarities)
            self._kept_bytes += height * width
        self._tiles.append((tile, kept))
        # A copy always: of a single row or column, `contiguous` would give what is overwritten next.
        mirror = similarities.t().clone(memory_format=torch.contiguous_format) if tile.mirrored else None
        self._add_counts(tile, similarities)
        if mirror is not None:
            self._add_counts(tile.mirror(), mirror)

    def _add_counts(self, tile: Tile, similarities: Float[Tensor, "r c"]) -> None:
        """Add those of a tile's rows; overwrites the similarities."""
        histogram = self.histogram
        bins = histogram.high, histogram.width, histogram.bins
        same_class = tile.same_class()
        if same_class is not None:
            is_counted = same_class.is_real
            if tile.is_diagonal and not histogram.self_pair:
                is_counted = same_class.without_diagonal()
            # Each pair is counted once, from one value. The difference 'all minus positives' would leave a rounding
            # residue in bins without negatives.
            of_positives = similarities.gather(1, same_class.columns).masked_fill_(~is_counted, -torch.inf)
            self._positives[tile.counts] += self._soft_counts(of_positives, *bins)
            same_class.add_to(similarities, -torch.inf)
        self._negatives[tile.counts] += self._soft_counts(similarities, *bins)

    def counts(self, gathered: Gathered) -> tuple[Float64[Tensor, "b M"], Float64[Tensor, "b M"]]:
        """Cumulative soft counts of the negatives and of the positives of each own query, once all are added."""
        positions = self.positions
        same_class = class_sizes(gathered)[positions].double()
        places = torch.searchsorted(gathered.own, positions)

        def with_total(soft: Tensor, total: Tensor) -> Tensor:
            """With the last column, which is the number of pairs, whatever their similarity."""
            return _in_order(torch.cat([soft[: len(total)], total[:, None]], dim=1), places)

        return (
            with_total(self._negatives, self.seen - same_class),
            with_total(self._positives, same_class - float(not self.histogram.self_pair)),
        )

    @property
    def positions(self) -> Int64[Tensor, " b"]:
        """Of the own images in the gallery, part by part, and by class in each."""
        return torch.cat([own.positions for own in self.own])

    def add_gradient(self, own: Images, slopes: Float[Tensor, "codes N"], gradient: Float[Tensor, "b C"]) -> None:
        """Second pass over the pairs of one part's own images that no earlier call went over.

        dL/dd_i = sum over j of (slope of i for the pair + slope of j for the pair) d_j. A descriptor's gradient as a
        query and as others' gallery image both come from its own row: nothing has to be reduced over ranks.

        Args:
            own: the images; their gradient is complete then.
            slopes: as `slopes_by_code` gives them.
            gradient: of all own images, in the order of `positions`; added to.
        """
        others = []
        for tile, codes in self._tiles:
            is_concerned = tile.queries is own or (tile.mirrored and tile.others is own)
            if not is_concerned:
                others.append((tile, codes))
                continue
            if codes is None:
                codes = self._codes(tile, tile.similarities())
            by_row = slopes[:, tile.queries.positions[tile.rows]].t().contiguous()
            by_similarity = self._slope_of_pairs(codes, by_row, slopes[:, tile.others.positions[tile.columns]])
            gradient[tile.counts].addmm_(by_similarity, tile.others.descriptors[tile.columns])
            if tile.mirrored:
                gradient[tile.mirror().counts].addmm_(by_similarity.t(), tile.queries.descriptors[tile.rows])
        self._tiles = others

    def whole_gradient(self, slopes: Float[Tensor, "codes N"], gathered: Gathered) -> Float[Tensor, "b C"]:
        """Second pass over all pairs, in the order of `gathered.own`."""
        gradient = torch.zeros_like(gathered.gallery[: len(gathered.own)])
        for own in self.own:
            self.add_gradient(own, slopes, gradient)
        return _in_order(gradient, torch.searchsorted(gathered.own, self.positions))

    def _codes(self, tile: Tile, similarities: Float[Tensor, "r c"]) -> UInt8[Tensor, "r c"]:
        """Where each pair's slope stands in the table: M - 1, a zero, for a pair that no similarity moves."""
        histogram = self.histogram
        codes: Tensor = self._bin_codes(similarities, histogram.high, histogram.width, histogram.bins)
        same_class = tile.same_class()
        if same_class is not None:
            same_class.add_to(codes, histogram.bins)
        if tile.is_diagonal:
            # An image's similarity to itself is constant: its slope would only change the descriptor's length.
            codes.fill_diagonal_(histogram.bins - 1)
        return codes


def slopes_by_code(slopes: Float64[Tensor, "b two_slopes"], gathered: Gathered) -> Float[Tensor, "codes N"]:
    """Slopes of all ranks by code and column: those of negatives by bin, 0, those of positives by bin, 0.

    What a cross-batch memory remembers queries nothing, so its slopes are zero.
    """
    shared = gathered.share(slopes.to(gathered.gallery.dtype))
    bins = shared.shape[1] // 2
    table = shared.new_zeros(2 * bins + 2, len(gathered.gallery))
    table[:bins, : len(shared)] = shared[:, :bins].t()
    table[bins + 1 : -1, : len(shared)] = shared[:, bins:].t()
    return table


def _in_order(rows: Float[Tensor, "b K"], places: Int64[Tensor, " b"]) -> Float[Tensor, "b K"]:
    in_order = torch.empty_like(rows)
    in_order[places] = rows
    return in_order


def _kernel_of_counts(like: Tensor) -> Callable[..., Tensor] | None:
    if not like.is_cuda or like.dtype != torch.float32:
        return None
    try:
        from distap.ranking.histogram import triton_kernels  # which only PyTorch's builds for GPUs can import
    except ImportError:
        return None
    return triton_kernels.soft_counts
