"""Losses of smooth ranks: Smooth-AP, SupAP, recall@k and PNP.

The rank of a positive k is one more than the number of images before it, and a step function of s_j
- s_k says how much image j counts as before k. With R⁺ the rank among the positives and R⁻ the
number of negatives before, the AP is the mean over k of R⁺ / (R⁺ + R⁻). Time, but no memory, grows
with the number of positives: B² P.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from distap.ranking.gathered import tie_width
from distap.ranking.loss import Presets
from distap.ranking.losses.base import PerPositive, PerQuery, Rows, Scores, SimilarityLoss, Totals
from distap.ranking.losses.steps import Step, Sums, bounding_step, sigmoid_step, step_sums


@dataclass(frozen=True)
class SigmoidStep:
    """The sigmoid as the step by which images count before others."""

    tau: PositiveFloat = 0.01
    """Temperature of the sigmoid, in units of similarity."""
    step: ClassVar[Step] = staticmethod(sigmoid_step)
    counts_exactly: ClassVar[bool] = False  # images of no less relevance, without gradient

    def step_numbers(self) -> tuple[float, ...]:
        """Return the parameters that `step` takes in addition to differences of similarities."""
        return (self.tau,)

    def sums(self, rows: Rows, images: Scores, positives: PerPositive) -> Sums:
        return step_sums(self.step, self.step_numbers(), rows.pairs, images, positives)


@dataclass(frozen=True)
class BoundingStep(SigmoidStep):
    """SupAP's step in place of the sigmoid (Ramzi et al. 2021, eq. 4 and 5).

    Positives before a positive are counted exactly, [s_j >= s_k], without gradient. A negative
    counts sigmoid(t / tau) for t = s_j - s_k <= 0, `start` more up to delta, and a line of slope
    rho beyond, so that a negative far before a positive keeps a gradient. Similarities that
    rounding may have parted count as a tie, so that duplicates are one whatever the size of the
    tiles.
    """

    rho: NonNegativeFloat = 100.0
    """Slope of the step's line, per unit of similarity."""
    delta: NonNegativeFloat | None = None
    """Difference of similarity at which the step's line begins; null takes tau ln 99 (sigmoid
    0.99)."""
    offset: float | None = None
    """Offset of the step's line rho t + offset; null continues the step at delta without a jump."""
    start: NonNegativeFloat = 0.5
    """Height added to the step where the difference of similarity t is above 0."""
    step: ClassVar[Step] = staticmethod(bounding_step)
    counts_exactly: ClassVar[bool] = True
    # elias-ramzi/ROADMAP: roadmap/losses/smooth_rank_ap.py has rho (t - delta) + 1.44 since
    # November 2022. Where rounding parts exact duplicates, that code adds `start` by chance; here
    # they tie.
    presets: ClassVar[Presets] = {"released": {"offset": -3.56, "delta": 0.05}}

    def step_numbers(self) -> tuple[float, ...]:
        delta = self.tau * math.log(99) if self.delta is None else self.delta
        at_delta = self.start + 1 / (1 + math.exp(-delta / self.tau))
        offset = at_delta - self.rho * delta if self.offset is None else self.offset
        return self.tau, self.rho, delta, offset, self.start


def at_least(ordered: Float[Tensor, "r n"], positives: PerPositive) -> PerPositive:
    """Count for each positive the similarities, in ascending order, that exceed or tie with it."""
    # Two equal descriptors may differ by rounding, in another way in each tile. As bits they would
    # be in some order, and a batch of duplicates would have another loss for each size of tiles.
    below = torch.searchsorted(
        ordered.contiguous(), (positives - tie_width(positives.dtype)).contiguous()
    )
    return (ordered.shape[1] - below).to(positives.dtype)


@dataclass(frozen=True)
class RankLoss(SigmoidStep, SimilarityLoss):
    """A function of the smooth ranks of a query's positives.

    A subclass writes `of_ranks`. Negatives count by `step`, positives by a sigmoid or exactly,
    without gradient.
    """

    query_is_counted: ClassVar[bool] = False  # before its positives, though it is none of them

    @abstractmethod
    def of_ranks(self, among: PerPositive, before: PerPositive, rows: Rows) -> PerQuery:
        """Return each query's loss, differentiable by the ranks R⁺ and the counts R⁻.

        Padding has finite numbers; `rows.is_positive` tells which are to be taken.
        """

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        negatives = rows.negatives
        of_class = rows.positives
        if self.query_is_counted:
            column = rows.queries[:, None]
            negatives = negatives.scatter(1, column, rows.similarities.gather(1, column))
        sums = self.sums(rows, negatives, of_class)
        before, falls = sums.counts()
        counted = of_class.masked_fill(~rows.is_positive, -torch.inf)
        if self.counts_exactly:
            # The positive itself is one of them.
            among = at_least(counted.sort(dim=1).values, counted)
        else:
            sigmoids = self.sums(rows, counted, of_class)
            counts, falls_among = sigmoids.counts()
            # The sum counts the positive itself with 0.5, so 0.5 more makes it 1.
            among = torch.where(rows.is_positive, counts + 0.5, 1)
        # Autograd goes through the formula of ranks, (r, P) numbers, never through the sums over
        # pairs: these have a derivative by hand, which keeps no table of r N P steps.
        with torch.enable_grad():
            value = self.of_ranks(among.requires_grad_(), before.requires_grad_(), rows)
            by_among, by_before = torch.autograd.grad(
                (rows.weights * value).sum(),
                (among, before),
                allow_unused=True,
                materialize_grads=True,
            )
        by_positive = -by_before * falls
        if not self.counts_exactly:  # each positive moves the ranks of others, and is moved by them
            by_positive += sigmoids.slopes(by_among) - by_among * falls_among
        return value.detach(), rows.with_positives(sums.slopes(by_before), by_positive)


@dataclass(frozen=True)
class SmoothAP(RankLoss):
    """Smooth-AP (Brown et al. 2020, eq. 5 to 8), with a sigmoid as the step."""

    is_ap: ClassVar[bool] = True

    def of_ranks(self, among: PerPositive, before: PerPositive, rows: Rows) -> PerQuery:
        # In this form the derivative by R⁺ is 0 where R⁻ is.
        precision = 1 / (1 + before / among)
        return 1 - (precision * rows.is_positive / rows.positive_count).sum(1)


@dataclass(frozen=True)
class SupAP(BoundingStep, SmoothAP):
    """SupAP (Ramzi et al. 2021), whose steps bound the AP loss from above.

    1 - AP <= SupAP holds if `start` is 0.5 and no negative ties with a positive: at t = 0 a
    negative counts half, whereas an AP that breaks ties against the query counts it whole.
    """


@dataclass(frozen=True)
class Form:
    """A form of recall@k: how the query, ranks and hits count."""

    query_is_positive: bool = False
    query_is_counted: bool = False  # before its positives, though it is none of them
    by_distance: bool = False
    first_rank: float = 1.0
    beyond_k: int = 0  # hits that count beyond k
    caps_hits: bool = False  # at most k images are ranked, and at most k hits count
    caps_positives: bool = True  # a query of more than k positives needs k hits


FORMS = {
    "paper": Form(caps_positives=False),
    "released": Form(query_is_counted=True, caps_hits=True),
    "suprank": Form(query_is_positive=True),
    "oml": Form(query_is_positive=True, by_distance=True, first_rank=0.5, beyond_k=1),
}


@dataclass(frozen=True)
class RecallAtK(RankLoss):
    """The recall@k surrogate RS@k (Patel et al. 2022): a smooth count of smooth ranks up to k."""

    ks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    """Numbers k of images, whose recalls are averaged."""
    hit_tau: PositiveFloat = 1.0
    """Temperature of the sigmoid by which a positive of rank r counts as among the first k, in
    ranks."""
    form: Literal["paper", "released", "suprank", "oml"] = "paper"
    """Leave the query out and divide hits by the number of positives (paper); count the query's own
    row in every rank, and at most k hits, over min(k, positives) (released); take the query as a
    positive (suprank); or that, by Euclidean distances, with k + 1 hits and ranks from 0.5
    (oml)."""
    self_pair: Literal[True] = True
    """Count a query among its own positives; `form` decides it, so leave it out."""
    # yash0307/RecallatK_surrogate ed05202, elias-ramzi/SupRank d3d0e3c,
    # OML-Team/open-metric-learning.
    presets: ClassVar[Presets] = {
        name: {"form": name} for name in ("paper", "released", "suprank")
    } | {"oml": {"form": "oml", "ks": (5,)}}

    @property
    def query_is_counted(self) -> bool:  # type: ignore[override]
        return FORMS[self.form].query_is_counted

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        form = FORMS[self.form]
        if not form.query_is_positive:
            rows = rows.without_query()
        if not form.by_distance:
            return super().value_and_slopes(rows, totals)
        # The root has no derivative at 0: descriptors that are equal get none.
        distances = (2 - 2 * rows.similarities).clamp(min=1e-12).sqrt()
        value, slopes = super().value_and_slopes(replace(rows, similarities=-distances), totals)
        return value, slopes / distances * (distances > 1e-6)

    def of_ranks(self, among: PerPositive, before: PerPositive, rows: Rows) -> PerQuery:
        form = FORMS[self.form]
        ranks = among + before + (form.first_rank - 1)
        positives = rows.positive_count[:, 0]
        recalls = list[Tensor]()
        for k in self.ks:
            limit = k + form.beyond_k
            if form.caps_hits:
                limit = min(limit, rows.similarities.shape[1])
            hits = (torch.sigmoid((limit - ranks) / self.hit_tau) * rows.is_positive).sum(1)
            if form.caps_hits:
                hits = hits.clamp(max=limit)
            needed = positives.clamp(max=limit) if form.caps_positives else positives
            recalls.append(hits / needed)
        return 1 - torch.stack(recalls).mean(0)


@dataclass(frozen=True)
class SupRecallAtK(BoundingStep, RecallAtK):
    """RS@k with SupAP's steps in place of sigmoids (Ramzi et al. 2025)."""

    form: Literal["paper", "suprank", "oml"] = "paper"
    presets: ClassVar[Presets] = {
        "suprank": {"form": "suprank", **BoundingStep.presets["released"]}
    }


@dataclass(frozen=True)
class PNP(RankLoss):
    """PNP (Li et al. 2022): penalise each positive by the number R of negatives before it."""

    form: Literal["O", "I_u", "I_b", "D_s", "D_q"] = "D_q"
    """Take R (O), (1 + R) ln(1 + R) (I_u), (bR - ln(1 + bR)) / b² (I_b), ln(1 + R) (D_s) or 1 - (1
    + R)^-alpha (D_q)."""
    b: PositiveFloat = 2.0
    """Number b of the form I_b."""
    alpha: PositiveFloat = 1.0
    """Exponent of the form D_q."""

    def of_ranks(self, among: PerPositive, before: PerPositive, rows: Rows) -> PerQuery:
        match self.form:
            case "O":
                penalty = before
            case "I_u":
                penalty = (1 + before) * before.log1p()
            case "I_b":
                penalty = (self.b * before - (self.b * before).log1p()) / self.b**2
            case "D_s":
                penalty = before.log1p()
            case "D_q":
                penalty = 1 - (1 + before) ** -self.alpha
        return (penalty * rows.is_positive / rows.positive_count).sum(1)
