"""Average Precision with soft bins: AP_Q, its tie-aware form AP_T, and FastAP."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered
from distap.ranking.histogram.loss import Histogram, loss_slopes
from distap.ranking.histogram.passes import Passes, slopes_by_code
from distap.ranking.protocol import LossValue
from distap.ranking.weights import Weights, query_weights


def quantized_average_precision(
    negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"]
) -> Float64[Tensor, " b"]:
    """AP_Q from cumulative soft counts (Revaud et al. 2019, eq. 10 to 12); 0 for a query without positives."""
    everything = negatives + positives
    in_bin, total = _in_bin(positives), positives[:, -1]
    precision = positives / torch.where(everything > 0, everything, 1)
    return (precision * in_bin).sum(1) / torch.where(total > 0, total, 1)


def simplified_tie_aware_precision(
    negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"]
) -> Float64[Tensor, " b"]:
    """AP_T, simplified (Revaud et al. 2019, eq. 13); 0 for a query without positives."""
    everything, total = negatives + positives, positives[:, -1]
    in_bin = _in_bin(positives)
    # Twice the count before the bin, and the bin's own: the counts before and after it.
    precision = (2 * positives - in_bin + 1) / (2 * everything - _in_bin(everything) + 1)
    return (precision * in_bin).sum(1) / torch.where(total > 0, total, 1)


def full_tie_aware_precision(
    negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"]
) -> Float64[Tensor, " b"]:
    """AP_T with the sum over the ranks within a bin as an integral (He et al. 2018); 0 without positives.

    As the reference implementation of Revaud et al. computes it, which bounds what has no meaning in bins of less
    than one image.
    """
    tiny = 1e-8
    everything, total = negatives + positives, positives[:, -1]
    positives_in_bin, in_bin = _in_bin(positives), _in_bin(everything)
    positives_before, before = positives - positives_in_bin, everything - in_bin
    ratio = (positives_in_bin - 1).clamp(min=0) / ((in_bin - 1).clamp(min=0) + tiny)
    growth = torch.log((everything + 1) / (before + 1))
    integral = in_bin * ratio + (positives_before + 1 - ratio * (before + 1)) * growth
    return (positives_in_bin * integral / (in_bin + tiny)).sum(1) / torch.where(total > 0, total, 1)


def _in_bin(cumulative: Float64[Tensor, "b M"]) -> Float64[Tensor, "b M"]:
    return cumulative.diff(dim=1, prepend=cumulative.new_zeros(len(cumulative), 1))


@dataclass(frozen=True)
class SoftBinnedAP(ABC):
    """1 - AP from soft counts in bins of similarity, the mean over queries.

    Args:
        bins: number of bin centres M, 2 to 128.
        low, high: similarities of the last and the first bin centre; the end bins are flat outside them.
        self_pair: whether a query counts itself among its positives, as the papers' code does.
        weights: `uniform`, or `class` so that each class weighs the same.
    """

    bins: int = 20
    low: float = -1.0
    high: float = 1.0
    self_pair: bool = True
    weights: Weights = "uniform"

    # Read by pydantic where this is a configuration section.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    def __post_init__(self) -> None:
        self.histogram()

    def histogram(self) -> Histogram:
        """Where the bins are."""
        return Histogram(self.bins, self.low, self.high, self.self_pair)

    @abstractmethod
    def average_precision(
        self, negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"], /
    ) -> Float64[Tensor, " b"]:
        """AP of each query from its cumulative soft counts; 0 for a query without positives."""

    def passes(self, queries: int, gallery: int, like: Tensor, budget: Budget) -> Passes:
        """To count pairs with while images arrive; the arguments are those of Passes."""
        return Passes(self.histogram(), queries, gallery, like, budget)

    def value_and_slopes(self, passes: Passes, gathered: Gathered) -> "LossSlopes":
        """Loss of the whole batch, once all its pairs are counted (Revaud et al. 2019, section 3.1)."""
        negatives, positives = passes.counts(gathered)
        weight = query_weights(gathered, self.weights)[gathered.own]
        width = self.histogram().width
        precision, slopes = loss_slopes(self.average_precision, negatives, positives, weight, width)
        loss = gathered.world.sum((weight * (1 - precision)).sum())
        per_query = torch.where(weight > 0, 1 - precision, torch.nan)
        return LossSlopes(loss, per_query, slopes_by_code(slopes, gathered))

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """Loss of the whole batch, and the gradient of this rank's descriptors."""
        gallery, labels = gathered.gallery, gathered.gallery_labels
        is_own = torch.zeros_like(labels, dtype=torch.bool)
        is_own[gathered.own] = True
        passes = self.passes(len(gathered.own), len(gallery), gallery, budget)
        passes.add(gallery, labels, is_own)
        loss, per_query, slopes = self.value_and_slopes(passes, gathered)
        return LossValue(loss, per_query, passes.whole_gradient(slopes, gathered))


class LossSlopes(NamedTuple):
    """A loss of the global batch, and its derivative by a similarity in each bin."""

    loss: Float64[Tensor, ""]  # the same on every rank
    per_query: Float64[Tensor, " b"]  # of this rank's queries, NaN for one without positive
    slopes: Float[Tensor, "codes N"]  # by code and column of the gallery, of all ranks' queries


@dataclass(frozen=True)
class QuantizedAP(SoftBinnedAP):
    """AP_Q (Revaud et al. 2019, eq. 7 to 12)."""

    name: Literal["ap_q"] = "ap_q"

    average_precision = staticmethod(quantized_average_precision)


@dataclass(frozen=True)
class FastAP(SoftBinnedAP):
    """FastAP (Cakir et al. 2019, eq. 9): AP_Q over intervals, so with one centre more, and without the self pair.

    Args:
        bins: number of intervals between bin centres, 1 to 127.
    """

    bins: int = 10
    self_pair: bool = False
    name: Literal["fast_ap"] = "fast_ap"

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= 127:
            raise ValueError(f"bins is {self.bins}; 1 to 127 are possible")
        super().__post_init__()

    average_precision = staticmethod(quantized_average_precision)

    def histogram(self) -> Histogram:
        """Where the bins are."""
        return Histogram(self.bins + 1, self.low, self.high, self.self_pair)


@dataclass(frozen=True)
class TieAwareAP(SoftBinnedAP):
    """AP_T: what AP is in the mean over all orders of the images within a bin (He et al. 2018).

    Args:
        form: `simplified` (Revaud et al. 2019, eq. 13), or `full`, the integral over a bin.
    """

    form: Literal["simplified", "full"] = "simplified"
    name: Literal["ap_t"] = "ap_t"

    def average_precision(
        self, negatives: Float64[Tensor, "b M"], positives: Float64[Tensor, "b M"], /
    ) -> Float64[Tensor, " b"]:
        """AP_T in the form chosen."""
        formula = simplified_tie_aware_precision if self.form == "simplified" else full_tie_aware_precision
        return formula(negatives, positives)
