"""Losses that rank pairwise with a smooth step: Smooth-AP and SupAP.

The rank of a positive k is one more than the number of images before it, and a step function h of s_j - s_k says
how much image j counts as before k. With R⁺ the rank among the positives and R⁻ the number of negatives before,
AP = mean over k of R⁺ / (R⁺ + R⁻). Time, but no memory, grows with the number of positives: B² P.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from distap.ranking import compiling
from distap.ranking.compiling import Function
from distap.ranking.loss import Presets
from distap.ranking.losses.base import Rows, SimilarityLoss

Similarities = Float[Tensor, "r _c"]  # those of a positive and what belongs to it are (r, 1)

# Each function goes over one row of similarities for one positive. `..._counts` gives how many images come before
# the positive, (r,). `..._slopes` adds their derivative, times `by_count`, to `total`, (r, c), and gives also its
# sum, (r,), by which the positive itself moves the other way.


def sigmoid_counts(similarities: Similarities, positive: Similarities, tau: float) -> Float[Tensor, " r"]:
    return torch.sigmoid((similarities - positive) / tau).sum(1)


def sigmoid_slopes(
    total: Similarities, similarities: Similarities, positive: Similarities, by_count: Similarities, tau: float
) -> tuple[Similarities, Float[Tensor, " r"]]:
    step = torch.sigmoid((similarities - positive) / tau)
    slope = by_count / tau * step * (1 - step)
    return total + slope, slope.sum(1)


def bounding_counts(similarities: Similarities, positive: Similarities, *step: float) -> Float[Tensor, " r"]:
    """Count negatives with SupAP's step (Ramzi et al. 2021, eq. 5)."""
    tau, rho, delta, offset, start = step
    t = similarities - positive
    return torch.where(t > delta, rho * t + offset, torch.sigmoid(t / tau) + start * (t > tie_width(t))).sum(1)


def bounding_slopes(
    total: Similarities, similarities: Similarities, positive: Similarities, by_count: Similarities, *step: float
) -> tuple[Similarities, Float[Tensor, " r"]]:
    tau, rho, delta, *_ = step
    t = similarities - positive
    height = torch.sigmoid(t / tau)
    slope = by_count * torch.where(t > delta, rho, height * (1 - height) / tau)
    return total + slope, slope.sum(1)


def tie_width(similarities: Tensor) -> float:
    """Return the difference up to which rounding may have separated two equal similarities."""
    return 16 * torch.finfo(similarities.dtype).eps


@dataclass(frozen=True)
class SmoothAP(SimilarityLoss):
    """Smooth-AP (Brown et al. 2020, eq. 5 to 8), with a sigmoid as the step."""

    tau: PositiveFloat = 0.01
    """Temperature of the sigmoid, in units of similarity."""
    is_ap: ClassVar[bool] = True
    step_functions: ClassVar[tuple[Function, Function]] = (sigmoid_counts, sigmoid_slopes)

    def value_and_slopes(self, rows: Rows, totals: Float64[Tensor, " totals"]) -> tuple[Tensor, Tensor]:
        negatives, step = rows.negatives, self.negative_step()
        count, slopes = self.step_functions
        if rows.pairs >= compiling.PAYS_FROM_PAIRS:
            count, slopes = map(compiling.compiled, self.step_functions)
        # One positive at a time, (r, N) each: all P at once would take P times the memory.
        columns = range(rows.positives.shape[1])
        before = torch.stack([count(negatives, rows.positives[:, k, None], *step) for k in columns], dim=1)
        rank = self.positive_ranks(rows)
        total = rank + before
        precision = (rank / total * rows.is_positive).sum(1, keepdim=True) / rows.positive_count
        # d(1 - AP) by R⁻ and by R⁺. The second is formed from R⁻ itself, so that it is 0 where R⁻ is.
        share = rows.weights[:, None] * rows.is_positive / (rows.positive_count * total.square())
        by_before, by_rank = share * rank, -share * before
        by_positive = self.positive_slopes(rows, by_rank)
        by_negative = torch.zeros_like(negatives)
        for k in columns:
            by_negative, of_positive = slopes(
                by_negative, negatives, rows.positives[:, k, None], by_before[:, k, None], *step
            )
            by_positive[:, k] -= of_positive
        return 1 - precision[:, 0].double(), rows.with_positives(by_negative, by_positive)

    def negative_step(self) -> tuple[float, ...]:
        """Return the last arguments of `step_functions`."""
        return (self.tau,)

    def positive_ranks(self, rows: Rows) -> Float[Tensor, "r P"]:
        """Return R⁺ of each positive: 1 + the sum of sigmoids over the other positives."""
        others = rows.counted_positives
        ranks = [sigmoid_counts(others, others[:, k, None], self.tau) for k in range(others.shape[1])]
        # The sum counts k itself with 0.5, so 0.5 more makes it 1; for padding it is not a number, and not used.
        return torch.where(rows.is_positive, torch.stack(ranks, dim=1) + 0.5, 1)

    def positive_slopes(self, rows: Rows, by_rank: Float[Tensor, "r P"]) -> Float[Tensor, "r P"]:
        """Turn the derivative by R⁺ into one by positives: each moves the ranks of others, and is moved by them."""
        others = rows.counted_positives
        total = torch.zeros_like(others)
        for k in range(others.shape[1]):
            center = rows.positives[:, k, None]
            total, of_k = sigmoid_slopes(total, others, center, by_rank[:, k, None], self.tau)
            total[:, k] -= of_k
        return total


@dataclass(frozen=True)
class SupAP(SmoothAP):
    """SupAP (Ramzi et al. 2021, eq. 4 and 5), with steps that bound the AP loss from above.

    Positives before a positive are counted exactly, [s_j >= s_k], without gradient. A negative counts
    sigmoid(t / tau) for t = s_j - s_k <= 0, `start` more up to delta, and a line of slope rho beyond, so that a
    negative far before a positive keeps a gradient.

    1 - AP <= SupAP holds if `start` is 0.5 and no negative ties with a positive: at t = 0 a negative counts half,
    whereas an AP that breaks ties against the query counts it whole. Similarities that rounding may have parted count
    as a tie, so that duplicates are one whatever the size of the tiles.
    """

    rho: NonNegativeFloat = 100.0
    """Slope of the step's line, per unit of similarity."""
    delta: NonNegativeFloat | None = None
    """Difference of similarity at which the step's line begins; null takes tau ln 99 (sigmoid 0.99)."""
    offset: float | None = None
    """Offset of the step's line rho t + offset; null continues the step at delta without a jump."""
    start: NonNegativeFloat = 0.5
    """Height added to the step where the difference of similarity t is above 0."""
    # elias-ramzi/ROADMAP: roadmap/losses/smooth_rank_ap.py has rho (t - delta) + 1.44 since November 2022.
    presets: ClassVar[Presets] = {"released": {"offset": -3.56, "delta": 0.05}}
    step_functions: ClassVar[tuple[Function, Function]] = (bounding_counts, bounding_slopes)

    def negative_step(self) -> tuple[float, ...]:
        delta = self.tau * math.log(99) if self.delta is None else self.delta
        at_delta = self.start + 1 / (1 + math.exp(-delta / self.tau))
        offset = at_delta - self.rho * delta if self.offset is None else self.offset
        return self.tau, self.rho, delta, offset, self.start

    def positive_ranks(self, rows: Rows) -> Float[Tensor, "r P"]:
        # Exact; positives of the same similarity all come before.
        others = rows.counted_positives
        ordered = others.sort(dim=1).values.contiguous()
        # Those of at least this similarity; k itself is one of them.
        return others.shape[1] - torch.searchsorted(ordered, others - tie_width(others)).to(others.dtype)

    def positive_slopes(self, rows: Rows, by_rank: Float[Tensor, "r P"]) -> Float[Tensor, "r P"]:
        return torch.zeros_like(by_rank)  # they are counted without gradient
