"""AP_Q, Average Precision with soft bins (Revaud et al. 2019, eq. 7 to 12), in linear memory.

A pair of similarity s falls at t = (high - s) / width, counted in bins from the most similar end. The
triangular kernel of the paper touches two neighbouring bins, and its running sum is a clamp: a pair adds
clamp(m + 1 - t, 0, 1) to the cumulative count of bin m. The loss depends on the similarities only through these
counts, a table of (B, bins), and inside a bin the counts are linear in s. So the derivative by a similarity is
a lookup: the slope of (query, bin of the pair, is it a positive). Two passes over blocks of rows follow, one to
count and one to look slopes up; the B x B similarities never exist at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from distap.ranking.gathered import Gathered
from distap.ranking.rank import Ranking
from distap.ranking.weights import Weights, query_weights

BLOCK_PAIRS = 2**20  # pairs of a block of rows: a few MB, so that what is done to a block stays in cache
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 1024


@dataclass(frozen=True)
class QuantizedAP:
    """1 - AP_Q, the mean over queries.

    Args:
        bins: number of bin centres M, at least 2.
        low, high: similarities of the last and the first bin centre; the end bins are flat outside them.
        self_pair: whether a query counts itself among its positives, as the paper's code does.
        weights: `uniform`, or `class` so that each class weighs the same.
    """

    name: Literal["ap_q"] = "ap_q"
    bins: int = 20
    low: float = -1.0
    high: float = 1.0
    self_pair: bool = True
    weights: Weights = "uniform"

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.bins < 2:
            raise ValueError(f"bins is {self.bins}; at least 2 are needed")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; low must be below high")

    @property
    def width(self) -> float:
        """Similarity between two neighbouring bin centres."""
        return (self.high - self.low) / (self.bins - 1)

    def value_and_gradient(self, gathered: Gathered) -> Ranking:
        """Loss of the whole batch, and the gradient of this rank's descriptors."""
        weights = query_weights(gathered.labels, self.weights)
        negatives, positives = self.count(gathered)
        precision, slopes = self.slopes(negatives, positives, weights[gathered.own])
        shared = gathered.share(torch.cat([slopes, precision[:, None]], dim=1))
        every_slope, every_precision = shared[:, :-1], shared[:, -1]
        loss = (weights * (1 - every_precision)).sum()
        per_query = torch.where(weights > 0, every_precision, torch.nan)
        return Ranking(loss, per_query, self.gradient(gathered, slopes, every_slope))

    def count(self, gathered: Gathered) -> tuple[Float64[Tensor, "b M"], Float64[Tensor, "b M"]]:
        """First pass: cumulative soft counts of the negatives and of the positives of each own query."""
        negatives, positives = [], []
        for block in _blocks(gathered):
            t = self.fractional_bin(block.similarities)
            row, column = self.positive_pairs(block)
            of_positives = t[row, column]
            # Each pair is counted once, from one value: what is no negative is moved beyond the last bin. The
            # difference 'all minus positives' would leave a rounding residue in bins without negatives.
            t[block.same_class] = self.bins
            negatives.append(torch.stack([_count(t, m).sum(1).double() for m in range(self.bins)], dim=1))
            shares = torch.stack([_count(of_positives, m) for m in range(self.bins)], dim=1).double()
            positives.append(torch.zeros_like(negatives[-1]).index_add_(0, row, shares))
        if not negatives:  # a rank all of whose rows are left out
            empty = gathered.descriptors.new_empty(0, self.bins, dtype=torch.float64)
            return empty, empty
        return torch.cat(negatives), torch.cat(positives)

    def slopes(
        self,
        negatives: Float64[Tensor, "b M"],
        positives: Float64[Tensor, "b M"],
        weights: Float64[Tensor, " b"],
    ) -> tuple[Float64[Tensor, " b"], Float64[Tensor, "b two_M"]]:
        """AP of each query, and the loss's derivative by a similarity in each bin.

        Returns:
            (b,) AP, and (b, 2M) slopes: those of negatives in the first M columns, of positives in the rest.
        """
        with torch.enable_grad():
            tables = [table.detach().requires_grad_() for table in (negatives, positives)]
            precision = quantized_average_precision(*tables)
            by_count = torch.autograd.grad((weights * (1 - precision)).sum(), tables)
        slopes = torch.stack(by_count, dim=1) / self.width
        slopes[:, :, -1] = 0  # beyond the last centre the counts are flat
        return precision.detach(), slopes.flatten(1)

    def gradient(
        self,
        gathered: Gathered,
        slopes: Float64[Tensor, "b two_M"],
        every_slope: Float64[Tensor, "B two_M"],
    ) -> Float[Tensor, "b C"]:
        """Second pass: dL/dd_i = sum over j of (slope of i for the pair + slope of j for the pair) d_j.

        Similarities are symmetric, so a descriptor's gradient as a query and as others' gallery image both
        come from its own row: nothing has to be reduced over ranks.
        """
        dtype, M = gathered.descriptors.dtype, self.bins
        negative, positive = slopes.to(dtype).split(M, dim=1)
        every_negative, every_positive = (table.t().contiguous() for table in every_slope.to(dtype).split(M, 1))
        gradient = torch.empty_like(gathered.descriptors[: len(gathered.own)])
        for block in _blocks(gathered):
            t = self.fractional_bin(block.similarities)
            bin_of = t.long()
            by_similarity = negative[block.rows].gather(1, bin_of) + every_negative.gather(0, bin_of)
            by_similarity[block.same_class] = 0
            row, column = self.positive_pairs(block)
            m = bin_of[row, column]
            by_similarity[row, column] = positive[block.rows][row, m] + every_positive[m, column]
            by_similarity[block.similarities > self.high] = 0  # flat before the first centre as well
            gradient[block.rows] = by_similarity @ gathered.descriptors
        return gradient

    def fractional_bin(self, similarities: Float[Tensor, "r B"]) -> Float[Tensor, "r B"]:
        """Where each pair falls, in bins from the most similar end, 0 to bins - 1."""
        return ((self.high - similarities) / self.width).clamp_(0, self.bins - 1)

    def positive_pairs(self, block: "_Block") -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
        """Rows and columns, within the block, of the pairs that count as positives."""
        row, column = block.same_class.nonzero(as_tuple=True)
        if not self.self_pair:
            others = block.own[row] != column
            row, column = row[others], column[others]
        return row, column


def quantized_average_precision(
    negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"]
) -> Float64[Tensor, " b"]:
    """AP_Q from cumulative soft counts (Revaud et al. 2019, eq. 10 to 12); 0 for a query without positives."""
    everything = negatives + positives
    in_bin = positives.diff(dim=1, prepend=positives.new_zeros(len(positives), 1))
    precision = positives / torch.where(everything > 0, everything, 1)
    total = positives[:, -1]
    return (precision * in_bin).sum(1) / torch.where(total > 0, total, 1)


@dataclass(frozen=True)
class _Block:
    rows: slice  # among this rank's own rows
    own: Int64[Tensor, " r"]  # the same rows among all B
    similarities: Float[Tensor, "r B"]
    same_class: Bool[Tensor, "r B"]


def _blocks(gathered: Gathered) -> Iterator[_Block]:
    """This rank's queries against the whole batch, some rows at a time."""
    total = len(gathered.labels)
    height = min(max(BLOCK_PAIRS // max(total, 1), MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    for start in range(0, len(gathered.own), height):
        own = gathered.own[start : start + height]
        yield _Block(
            slice(start, start + len(own)),
            own,
            gathered.descriptors[own] @ gathered.descriptors.t(),
            gathered.labels[own, None] == gathered.labels[None],
        )


def _count(t: Tensor, m: int) -> Tensor:
    """What pairs at `t` add to the cumulative count of bin m."""
    return (m + 1 - t).clamp_(0, 1)
