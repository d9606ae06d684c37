"""Losses that see the similarities through soft histograms only, in linear memory.

A pair of similarity s falls at t = (high - s) / width, counted in bins from the most similar end. The triangular
kernel of Revaud et al. (2019, eq. 7) touches two neighbouring bins, and its running sum is a clamp: a pair adds
clamp(m + 1 - t, 0, 1) to the cumulative count of bin m. The loss depends on the similarities only through these
counts, two tables of (B, M), and inside a bin the counts are linear in s. So the derivative by a similarity is
a lookup: the slope of (query, bin of the pair, is it a positive).

Two passes over tiles of pairs (`passes`) follow, one to count and one to look slopes up; the B x B similarities never
exist at once. Three things make them fast:
- similarities are symmetric, so of a rank's own images only the tiles on and above the diagonal are needed;
- the first pass keeps each pair's bin as one byte where the budget allows, so that the second needs no product;
- images are sorted by class, so that a query's positives are neighbours and picked out at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

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
