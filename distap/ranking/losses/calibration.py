"""The calibration loss, and ROADMAP, which is SupAP plus calibration."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from distap.ranking.loss import Presets
from distap.ranking.losses.base import Rows, SimilarityLoss, Totals
from distap.ranking.losses.smooth import SupAP


@dataclass(frozen=True)
class Calibration(SimilarityLoss):
    """Push positives above similarity alpha and negatives below beta (Ramzi et al. 2021, eq. 7).

    The form `all` is the mean over a query's positives plus that over its negatives; `violating`,
    like the authors' code, the mean over all pairs of the batch on the wrong side of alpha plus
    that over those on that of beta; `sum` takes sums in place of the means, and the preset `xbm` is
    the contrastive loss of Wang et al. 2020 (Cross-Batch Memory) but for a constant.
    """

    self_pair: bool = False
    alpha: float = 0.9
    """Similarity that positives should exceed."""
    beta: float = 0.6
    """Similarity that negatives should stay below."""
    form: Literal["all", "violating", "sum"] = "all"
    """Take means over all pairs, means over those that violate alpha or beta, or sums."""
    presets: ClassVar[Presets] = {
        "released": {"form": "violating"},
        # threshold-consistent margin (Zhang et al. 2024)
        "tcm": {"form": "violating", "beta": 0.5},
        "xbm": {"alpha": 1.0, "beta": 0.5, "form": "sum"},
    }

    def shape_of_totals(self, columns: int) -> tuple[int, ...]:
        return (2,) if self.form == "violating" else (0,)

    def totals(self, rows: Rows) -> Totals:
        # The weights of the violating positive and negative pairs.
        weight = rows.weights.double()
        violations = self._violations(rows)
        return torch.stack([(weight * (excess > 0).sum(1)).sum() for excess in violations])

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, Tensor]:
        pull, push = self._violations(rows)
        positives = negatives = torch.ones_like(rows.positive_count)
        if self.form == "violating":
            positives, negatives = 1 / totals.clamp(min=torch.finfo().tiny).to(pull.dtype)
        elif self.form == "all":
            count = (~rows.negatives.isinf()).sum(1, keepdim=True).clamp(min=1)
            positives = 1 / rows.positive_count
            negatives = 1 / count.to(pull.dtype)
        # Both parts are linear where they violate: the slope is the factor of the mean, or 0.
        value = (pull * positives).sum(1) + (push * negatives).sum(1)
        weight = rows.weights[:, None]
        by_positive = -weight * positives * (pull > 0)
        return value, rows.with_positives(weight * negatives * (push > 0), by_positive)

    def _violations(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # How far positives (r, P) and negatives (r, N) are on the wrong side; images of the class
        # are -inf among the negatives, and so never are, nor are those that rounding alone may have
        # put there.
        pull = (self.alpha - rows.positives).masked_fill(~rows.is_positive, 0)
        push = rows.negatives - self.beta
        pull = pull.masked_fill(pull <= rows.tie_width, 0)
        return pull, push.masked_fill(push <= rows.tie_width, 0)


@dataclass(frozen=True)
class Roadmap(SupAP, Calibration):
    """(1 - lam) SupAP + lam calibration (Ramzi et al. 2021, eq. 8), from the same similarities.

    `self_pair` concerns SupAP alone: in calibration a query is no positive of its own.
    """

    lam: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the calibration loss; SupAP has the weight 1 - lam."""
    scale: PositiveFloat = 1.0
    """Factor of the sum; the authors' configuration adds both losses whole (2)."""
    is_ap: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        name: {**preset, "form": "violating", "scale": 2.0}
        for name, preset in SupAP.presets.items()
    }

    def totals(self, rows: Rows) -> Totals:
        return Calibration.totals(self, rows.without_query())

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, Tensor]:
        # Both take the same block: similarities are multiplied once, where a sum of two losses
        # would do it twice.
        ranking, by_ranking = SupAP.value_and_slopes(self, rows, totals)
        scores, by_scores = Calibration.value_and_slopes(self, rows.without_query(), totals)
        first = self.scale * (1 - self.lam)
        second = self.scale * self.lam
        return first * ranking + second * scores, first * by_ranking + second * by_scores
