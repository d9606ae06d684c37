"""AP of the exact ranking, with its gradient by blackbox differentiation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn import functional

from distap.ranking.losses.base import Rows, SimilarityLoss, Totals


@dataclass(frozen=True)
class BlackBoxAP(SimilarityLoss):
    """1 - AP of the exact ranking, with the difference of two as gradient (Rolínek et al. 2020).

    Ranks are piecewise constant in the similarities. With r the ranks over N, the derivative by the
    similarities is taken as (r(s + lam dL/dr) - r(s)) / lam: how the ranking changes when the
    scores move by the loss's derivative. So the gradient is not that of the value, but of a
    piecewise linear interpolation of it.

    Images whose similarities tie rank in the order of the batch; the gradient depends on that.
    """

    self_pair: bool = False
    lam: PositiveFloat = 4.0
    """Distance λ by which the scores move; more is smoother."""
    margin: float = 0.02
    """Margin α of the paper, in units of similarity: before ranking, positives are lowered and
    negatives raised by half of it. (The paper's code draws the margin of each pair at random.)"""
    is_ap: ClassVar[bool] = True

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, Tensor]:
        positive = rows.positive_columns
        is_ranked = ~rows.negatives.isinf() | positive
        # The query itself is not ranked: it goes to the end and shifts nobody's rank.
        scores = rows.similarities + self.margin * (0.5 - positive.to(rows.similarities.dtype))
        scores = scores.masked_fill(~is_ranked, -torch.inf)
        count = is_ranked.sum(1, keepdim=True)
        rank = _ranks(scores, rows.tie_width) / count
        of_positive = rank.gather(1, rows.same_class)
        positives = of_positive.masked_fill(~rows.is_positive, torch.inf)
        among_positives = _ranks(-positives, 0.0) / count
        # AP is the mean over positives of their rank among positives over their rank among all. Its
        # derivative by the latter moves the scores; one more sort of the moved scores then stands
        # for the derivative of sorting.
        precision = among_positives / of_positive * rows.is_positive / rows.positive_count
        by_rank = rows.weights[:, None] * precision / of_positive
        moved = scores.scatter_add(1, rows.same_class, self.lam * by_rank * rows.is_positive)
        slopes = (_ranks(moved, rows.tie_width) / count - rank) / self.lam * is_ranked
        return 1 - precision.sum(1).double(), slopes


def _ranks(scores: Float[Tensor, "r n"], tie_width: float) -> Float[Tensor, "r n"]:
    """Return each score's rank in its row, from 1 for the greatest; of ties the first leads."""
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    # A gap wider than a tie begins a new group. Sorted by group alone, columns of a group keep
    # their order.
    begins = ordered[:, :-1] - ordered[:, 1:] > tie_width
    group = functional.pad(begins.cumsum(1), (1, 0))
    order = torch.empty_like(order).scatter_(1, order, group).argsort(dim=1, stable=True)
    places = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    return torch.empty_like(scores).scatter_(1, order, places.expand_as(scores))
