"""The calibration loss, and ROADMAP, which adds it to SupAP."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from distap.ranking.losses.rows import RowLoss, Rows
from distap.ranking.losses.smooth import SupAP

Form = Literal["all", "violating"]


@dataclass(frozen=True)
class Calibration(RowLoss):
    """Positives are to be more similar than alpha, negatives less than beta (Ramzi et al. 2021, eq. 7).

    Args:
        alpha: similarity below which a positive is pulled.
        beta: similarity above which a negative is pushed.
        form: `all`, the mean over a query's positives plus that over its negatives; or `violating`, the mean over
            all pairs of the batch on the wrong side of alpha plus that over those on the wrong side of beta, as the
            reference implementation has it.
    """

    self_pair: bool = False
    alpha: float = 0.9
    beta: float = 0.6
    form: Form = "all"
    name: Literal["calibration"] = "calibration"

    @property
    def number_of_totals(self) -> int:
        """Two where violating pairs have to be counted first."""
        return 2 if self.form == "violating" else 0

    def totals(self, rows: Rows) -> Float64[Tensor, " totals"]:
        """Weights of the violating positive and negative pairs."""
        pull, push = self._violations(rows)
        weight = rows.weights.double()
        return torch.stack([(weight * (part > 0).sum(1)).sum() for part in (pull, push)])

    def by_rows(self, rows: Rows, totals: Float64[Tensor, " totals"]) -> tuple[Tensor, Tensor]:
        """Both means of each query, and the derivative of their weighted sum by each similarity."""
        pull, push = self._violations(rows)
        if self.form == "violating":
            positives, negatives = (1 / total.clamp(min=torch.finfo().tiny).to(pull.dtype) for total in totals)
        else:
            positives = 1 / rows.positive_count
            negatives = 1 / (~rows.negatives.isinf()).sum(1, keepdim=True).clamp(min=1).to(pull.dtype)
        value = (pull * positives).sum(1) + (push * negatives).sum(1)
        weight = rows.weights[:, None]
        by_positive = -weight * positives * (pull > 0)
        by_negative = weight * negatives * (push > 0)
        return value.double(), rows.with_positives(by_negative, by_positive)

    def _violations(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """How far positives (r, P) and negatives (r, N) are on the wrong side."""
        pull = (self.alpha - rows.positives).clamp(min=0) * rows.is_positive
        return pull, (rows.negatives - self.beta).clamp(min=0)


@dataclass(frozen=True)
class Roadmap(RowLoss):
    """(1 - lam) SupAP + lam calibration (Ramzi et al. 2021, eq. 8), from one row of similarities.

    Args:
        lam: share of the calibration loss, 0 to 1.
        self_pair: whether a query counts itself among its positives in SupAP; in calibration it does not.
        tau, rho, delta, offset: as those of SupAP.
        alpha, beta, form: as those of calibration.
    """

    lam: float = 0.5
    tau: float = 0.01
    rho: float = 100.0
    delta: float | None = None
    offset: float | None = None
    alpha: float = 0.9
    beta: float = 0.6
    form: Form = "all"
    name: Literal["roadmap"] = "roadmap"

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam is {self.lam}; 0 to 1 are possible")
        self.sup_ap()
        self.calibration()

    def sup_ap(self) -> SupAP:
        """The term that ranks."""
        return SupAP(self.self_pair, self.weights, tau=self.tau, rho=self.rho, delta=self.delta, offset=self.offset)

    def calibration(self) -> Calibration:
        """The term that keeps scores comparable between queries."""
        return Calibration(weights=self.weights, alpha=self.alpha, beta=self.beta, form=self.form)

    @property
    def number_of_totals(self) -> int:
        """Those of calibration."""
        return self.calibration().number_of_totals

    def totals(self, rows: Rows) -> Float64[Tensor, " totals"]:
        """Those of calibration."""
        return self.calibration().totals(rows.without_query())

    def by_rows(self, rows: Rows, totals: Float64[Tensor, " totals"]) -> tuple[Tensor, Tensor]:
        """The weighted sum of both."""
        ranking, by_ranking = self.sup_ap().by_rows(rows, totals)
        scores, by_scores = self.calibration().by_rows(rows.without_query(), totals)
        lam = self.lam
        return (1 - lam) * ranking + lam * scores, (1 - lam) * by_ranking + lam * by_scores
