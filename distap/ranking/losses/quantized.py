"""Average Precision with soft bins: AP_Q, its tie-aware form AP_T, and FastAP."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import pad

from distap.ranking import compiling
from distap.ranking.gathered import Gathered
from distap.ranking.histogram.passes import (
    Counts,
    HistogramLoss,
    bin_codes,
    soft_counts,
)
from distap.ranking.loss import Budget, LossValue, Presets
from distap.ranking.losses.base import Rows, SimilarityLoss, Totals


class SoftBinsAP(HistogramLoss):
    """A loss of soft bins, whose queries and gallery may be of two networks."""

    asymmetric: ClassVar[bool] = True

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        if gathered.other_queries is None:
            return super().value_and_gradient(gathered, budget)
        # The tiles of passes.py stand for their mirror images, but such similarities are not
        # symmetric: they are counted row by row.
        by_rows = SoftBinsOfRows(self, self_pair=self.self_pair, weights=self.weights)
        return by_rows.value_and_gradient(gathered, budget)


@dataclass(frozen=True)
class SoftBinsOfRows(SimilarityLoss):
    """A loss of soft bins that counts whole rows of similarities; see passes.py for the maths."""

    bins: HistogramLoss

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        loss = self.bins
        count = rows.is_positive.sum(1, keepdim=True)
        negative_count = (~rows.negatives.isinf()).sum(1, keepdim=True)
        sides = (
            (rows.negatives, negative_count),
            (
                rows.positives.masked_fill(~rows.is_positive, -torch.inf),
                count,
            ),
        )
        compiles = rows.pairs >= compiling.PAYS_FROM_PAIRS * (
            compiling.ON_GPU if rows.similarities.is_cuda else 1
        )
        counts = compiling.compiled(soft_counts) if compiles else soft_counts
        tables = list[Tensor]()
        for similarities, total in sides:
            soft = counts(similarities, loss.high, loss.width, loss.centres)
            tables.append(torch.cat([soft, total], dim=1).double().requires_grad_())
        with torch.enable_grad():
            value = 1 - loss.average_precision(*tables)
            by_count = torch.autograd.grad((rows.weights * value).sum(), tables)
        slopes = list[Tensor]()
        for (similarities, _), table in zip(sides, by_count, strict=True):
            # Pairs outside the bins have the last code, and slope 0.
            by_code = pad(table[:, :-1] / loss.width, (0, 1)).to(similarities.dtype)
            codes = bin_codes(similarities, loss.high, loss.width, loss.centres)
            slopes.append(by_code.gather(1, codes.long()))
        return value.detach(), rows.with_positives(*slopes)


@dataclass(frozen=True)
class QuantizedAP(SoftBinsAP):
    """AP_Q, Average Precision with quantised similarities (Revaud et al. 2019, eq. 7 to 12)."""

    # naver/deep-image-retrieval, dirtorch/loss.py at commit 11171a8; it counts an image alone in
    # its class as AP 1.
    presets: ClassVar[Presets] = {"dirtorch": {"bins": 25, "low": 0.0, "high": 1.0}}

    def average_precision(self, negatives: Counts, positives: Counts) -> Float64[Tensor, " b"]:
        """Sum over bins the precision up to the bin times its share of positives (eq. 10 to 12)."""
        everything = negatives + positives
        total = positives[:, -1]
        precision = positives / torch.where(everything > 0, everything, 1)
        return (precision * _in_bin(positives)).sum(1) / torch.where(total > 0, total, 1)


@dataclass(frozen=True)
class FastAP(QuantizedAP):
    """FastAP (Cakir et al. 2019, eq. 9): AP from soft histograms, without the query itself."""

    bins: int = 10
    """Number of intervals between bin centres, 1 to 127."""
    self_pair: bool = False
    presets: ClassVar[Presets] = {}

    @property
    def centres(self) -> int:
        return self.bins + 1


@dataclass(frozen=True)
class TieAwareAP(SoftBinsAP):
    """AP_T: the mean AP over all orders of the images within a bin (He et al. 2018)."""

    form: Literal["simplified", "full"] = "simplified"
    """Use Revaud et al. 2019, eq. 13 (simplified), or the integral over a bin, with the bounds of
    their code for bins of less than one image (full)."""
    presets: ClassVar[Presets] = {"dirtorch": {"bins": 25, "low": 0.0, "high": 1.0, "form": "full"}}

    def average_precision(self, negatives: Counts, positives: Counts) -> Float64[Tensor, " b"]:
        everything = negatives + positives
        total = positives[:, -1]
        positives_in_bin = _in_bin(positives)
        in_bin = _in_bin(everything)
        if self.form == "simplified":
            # Twice the count before the bin, and the bin's own: the counts before and after it.
            precision = (2 * positives - positives_in_bin + 1) / (2 * everything - in_bin + 1)
        else:
            # With b images and p positives before the bin, the mean over x, from 0 to all images of
            # the bin, of (p + 1 + ratio x) / (b + 1 + x): the precision at a positive that has x of
            # the others before it.
            tiny = 1e-8
            positives_before = positives - positives_in_bin
            before = everything - in_bin
            ratio = (positives_in_bin - 1).clamp(min=0) / ((in_bin - 1).clamp(min=0) + tiny)
            growth = torch.log((everything + 1) / (before + 1))
            precision = (
                in_bin * ratio + (positives_before + 1 - ratio * (before + 1)) * growth
            ) / (in_bin + tiny)
        return (precision * positives_in_bin).sum(1) / torch.where(total > 0, total, 1)


def _in_bin(cumulative: Counts) -> Counts:
    return cumulative.diff(dim=1, prepend=cumulative.new_zeros(len(cumulative), 1))
