"""Average Precision with soft bins: AP_Q, its tie-aware form AP_T, and FastAP."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from distap.ranking.histogram.passes import Counts, HistogramLoss
from distap.ranking.loss import Presets


@dataclass(frozen=True)
class QuantizedAP(HistogramLoss):
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
class TieAwareAP(HistogramLoss):
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
