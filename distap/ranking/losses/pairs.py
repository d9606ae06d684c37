"""Losses of pairs and triplets of the whole batch: SupCon, InfoNCE, sigmoid, triplet and others."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize

from distap.ranking.gathered import Gathered, tie_width
from distap.ranking.loss import Budget, KnownClasses, LossValue
from distap.ranking.losses.base import Mask, PerQuery, Rows, Scores, SimilarityLoss, Totals
from distap.ranking.losses.steps import Step, hinge_step, softplus, softplus_step, step_sums

SMALLEST = 1e-14  # squared distance, since the root has no derivative at 0


@dataclass(frozen=True)
class PairLoss(SimilarityLoss):
    """A loss of pairs of different images."""

    self_pair: Literal[False] = False


@dataclass(frozen=True)
class SupCon(PairLoss):
    """Supervised contrastive loss (Khosla et al. 2020, eq. 2): a softmax over all other images."""

    temperature: PositiveFloat = 0.07
    """Temperature of the similarities."""

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        logits = similarities / self.temperature
        of_all = logits.masked_fill(~(positive | negative), -torch.inf).logsumexp(1)
        return of_all - (logits * positive).sum(1) / positive.sum(1).clamp(min=1)


@dataclass(frozen=True)
class InfoNCE(SupCon):
    """InfoNCE (van den Oord et al. 2018): a softmax over each positive and all negatives."""

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        logits = similarities / self.temperature
        of_negatives = logits.masked_fill(~negative, -torch.inf).logsumexp(1, keepdim=True)
        # ln(e^p + sum of e^n) - p
        losses = softplus(of_negatives - logits)
        return (losses * positive).sum(1) / positive.sum(1).clamp(min=1)


@dataclass(frozen=True)
class Sigmoid(PairLoss):
    """Sigmoid loss of all pairs (SigLIP, Zhai et al. 2023): the mean of softplus(-z (t s + b)).

    z is 1 for positives and -1 for negatives. The scale t = e^log_scale and the bias b are trained
    with the network.
    """

    scale: PositiveFloat = 10.0
    """Scale t of similarities that training begins with."""
    bias: float = -10.0
    """Bias b that training begins with."""
    needs_positives: ClassVar[bool] = False

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> "Sigmoid":
        # A loss of its own, with parameters of its own: they are made once for each object.
        return replace(self)

    @cached_property
    def learned(self) -> nn.ParameterDict:
        first = {"log_scale": math.log(self.scale), "bias": self.bias}
        return nn.ParameterDict(
            {name: nn.Parameter(torch.tensor(value)) for name, value in first.items()}
        )

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        scale = self.learned["log_scale"].exp().to(similarities)
        bias = self.learned["bias"].to(similarities)
        is_counted = positive | negative
        # -z is 1 for a negative, and -1 for a positive.
        signs = negative.to(similarities.dtype) * 2 - 1
        losses = softplus(signs * (scale * similarities + bias)) * is_counted
        return losses.sum(1) / is_counted.sum(1).clamp(min=1)


@dataclass(frozen=True)
class MultiSimilarity(PairLoss):
    """Multi-similarity loss (Wang et al. 2019, eq. 8 to 10) of pairs that `epsilon` selects."""

    alpha: PositiveFloat = 2.0
    """Sharpness of the weights of positives."""
    beta: PositiveFloat = 50.0
    """Sharpness of the weights of negatives."""
    base: float = 0.5
    """Similarity λ of the paper: positives below it and negatives above it weigh most."""
    epsilon: NonNegativeFloat | None = 0.1
    """Take pairs within this similarity of the hardest one of the other kind; null takes all
    pairs."""

    def loss_of_rows(self, similarities: Scores, rows: Rows) -> PerQuery:
        positive = rows.positive_columns
        negative = rows.negative_columns
        if self.epsilon is not None:
            scores = similarities.detach()
            closest = scores.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
            farthest = scores.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
            # A pair that ties with the last one that is too easy is too easy as well.
            within = self.epsilon - rows.tie_width
            positive = positive & (scores < closest + within)
            negative = negative & (scores > farthest - within)
        pulled = _one_and_sum(self.alpha * (self.base - similarities), positive) / self.alpha
        return pulled + _one_and_sum(self.beta * (similarities - self.base), negative) / self.beta


@dataclass(frozen=True)
class DistanceLoss(PairLoss):
    """A loss of Euclidean distances, in float64: near 0 they are mostly rounding in float32."""

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        # Twice the memory of the gallery; rounding to float32 at the end costs nothing that counts.
        dtype = gathered.gallery.dtype
        exact = gathered.converted(lambda rows: normalize(rows.double()), given_dtype=dtype)
        value = super().value_and_gradient(exact, budget)
        return value._replace(gradient=value.gradient.to(dtype))


@dataclass(frozen=True)
class Contrastive(DistanceLoss):
    """Contrastive loss of distances (Hadsell et al. 2006; Radenović et al. 2018, eq. 4).

    A query's loss is the mean of d² / 2 over its positives, and of (margin - d)² / 2 over the
    negatives that are nearer than the margin. With `negatives` it is the sum over that many nearest
    ones instead, as in the paper's tuples, which hold 5 negatives for each positive.
    """

    margin: PositiveFloat = 0.7
    """Distance of descriptors, 0 to 2, beyond which negatives are ignored."""
    negatives: PositiveInt | None = None
    """Take this many nearest negatives of a query; null takes all within the margin."""

    def loss_of_rows(self, similarities: Scores, rows: Rows) -> PerQuery:
        positive = rows.positive_columns
        negative = rows.negative_columns
        distances = _distances(similarities)
        pulled = (distances.square() * positive).sum(1) / positive.sum(1).clamp(min=1)
        gaps = self.margin - distances
        is_near = (gaps > tie_width(gaps.dtype)) & negative
        pushes = gaps.square() * is_near
        if self.negatives is not None:
            scores = similarities.detach().masked_fill(~negative, -torch.inf)
            nearest = _shares_of_greatest(scores, self.negatives, rows.tie_width)
            return (pulled + (pushes * nearest).sum(1)) / 2
        return (pulled + pushes.sum(1) / is_near.sum(1).clamp(min=1)) / 2


@dataclass(frozen=True)
class Triplet(DistanceLoss):
    """Triplet loss, mined in the whole global batch: a mean over the triplets of each query.

    These are `all` that violate the margin, as pytorch-metric-learning takes them; `hardest`, one
    of the farthest positive and the nearest negative (Hermans et al. 2017), with which training
    from random weights often collapses; `hard_negative`, one of each positive and the nearest
    negative (Gordo et al. 2017, the baseline of Revaud et al. 2019); or `semi_hard`, one of each
    positive and the nearest negative that is farther than it, if there is one (Schroff et al.
    2015).
    """

    margin: PositiveFloat | None = 0.1
    """Margin of distances; null is the soft margin, log(1 + exp)."""
    mining: Literal["all", "hardest", "hard_negative", "semi_hard"] = "all"
    """Take all triplets within the margin; the hardest pairs; each positive with the nearest
    negative; or with the nearest negative that is farther than it."""
    squared: bool = False
    """Compare squared distances, as Gordo et al. and Schroff et al. do."""

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        if self.mining != "all":
            return super().value_and_slopes(rows, totals)
        distances = _squared(rows.similarities) if self.squared else _distances(rows.similarities)
        # Negatives and positives by -distance: the nearer a negative is than a positive, the more
        # it violates.
        near = replace(rows, similarities=-distances)
        # The first number is a tau of 1, for which the soft margin's derivative is the sigmoid.
        if self.margin is None:
            step: Step = softplus_step
            numbers: tuple[float, ...] = (1.0,)
        else:
            step = hinge_step
            numbers = (1.0, self.margin)
        sums = step_sums(step, numbers, rows.pairs, near.negatives, near.positives)
        # r N P triplets, of which none is kept: their number differs by positive, and the mean is
        # over a query's.
        losses, violating = sums.counts()
        counted = violating
        if self.margin is None:
            counted = (~near.negatives.isinf()).sum(1, keepdim=True)
        triplets = (counted * rows.is_positive).sum(1, keepdim=True).clamp(min=1)
        by_loss = rows.weights[:, None] * rows.is_positive / triplets
        slopes = rows.with_positives(sums.slopes(by_loss), -by_loss * violating)
        value = (losses * rows.is_positive / triplets).sum(1)
        # From derivatives by -distance to those by similarity: as d² = 2 - 2 s, -d² rises with s by
        # 2, -d by 1 / d.
        rise = 2 if self.squared else 1 / distances * (distances > SMALLEST**0.5)
        return value, slopes * rise

    def loss_of_rows(self, similarities: Scores, rows: Rows) -> PerQuery:
        positive = rows.positive_columns
        negatives = similarities.masked_fill(~rows.negative_columns, -torch.inf)
        if self.mining == "hardest":
            distant = (-similarities).masked_fill(~positive, -torch.inf)
            similarities = -_greatest(distant, rows.tie_width)
            positive = torch.ones_like(similarities, dtype=torch.bool)
        if self.mining == "semi_hard":
            closest = _next_below(similarities.detach(), negatives, rows.tie_width)
        else:
            closest = _greatest(negatives, rows.tie_width)
        # A negative that is not there is infinitely far away.
        distances: Callable[[Tensor], Tensor] = _squared if self.squared else _distances
        violations = distances(similarities) - distances(closest)
        if self.margin is None:
            losses = softplus(violations)
        else:
            losses = (violations + self.margin).clamp(min=0)
        return (losses * positive).sum(1) / positive.sum(1).clamp(min=1)


def _shares_of_greatest(scores: Scores, count: int, width: float) -> Scores:
    """Return 1 for the `count` greatest scores of each row; ties at the last place share theirs."""
    count = min(count, scores.shape[1])
    last = scores.topk(count, dim=1).values[:, -1:]
    is_above = scores > last + width
    is_tied = (scores >= last - width) & ~is_above
    share = (count - is_above.sum(1, keepdim=True)) / is_tied.sum(1, keepdim=True)
    return is_above + is_tied * share


def _greatest(scores: Scores, width: float) -> Float[Tensor, "r 1"]:
    """Return the greatest score of each row; those that tie with it share its derivative."""
    shares = _shares_of_greatest(scores.detach(), 1, width)
    return torch.where(shares > 0, scores * shares, 0).sum(1, keepdim=True)


def _next_below(similarities: Scores, negatives: Scores, width: float) -> Scores:
    """Return for each similarity the greatest negative that is smaller by more than a tie, or -inf.

    Negatives that tie with that one share its derivative.
    """
    # Sorting a row once finds it for all positives, in the place of a comparison of each with each
    # negative.
    ordered = negatives.sort(1).values
    values = ordered.detach()
    # The query's own column is -inf, so there is always one below.
    end = torch.searchsorted(values, similarities - width)
    nearest = values.gather(1, end - 1)
    start = torch.searchsorted(values, nearest - width)
    sums = functional.pad(ordered.masked_fill(values.isinf(), 0).cumsum(1), (1, 0))
    mean = (sums.gather(1, end) - sums.gather(1, start)) / (end - start)
    # The value of one negative, with the derivative of the mean of those that tie.
    return nearest + mean - mean.detach()


def _one_and_sum(exponents: Scores, taken: Mask) -> PerQuery:
    # log(1 + sum of e^x over those taken): a column of zeros stands for the 1, so that no e^x
    # overflows.
    of_one = torch.zeros_like(exponents[:, :1])
    return torch.cat([of_one, exponents.masked_fill(~taken, -torch.inf)], dim=1).logsumexp(1)


def _squared(similarities: Tensor) -> Tensor:
    return 2 - 2 * similarities


def _distances(similarities: Tensor) -> Tensor:
    return _squared(similarities).clamp(min=SMALLEST).sqrt()
