"""Exact figures of retrieval by name, computed from the ranks of each query's positives.

Public codebases disagree, so here are the definitions. Ranks count from 1. P(k) is the share of positives among the
first k. A query without a positive is left out of the means and counted. A positive ranks after the negatives that
it ties with, so that a network that maps every image to the same descriptor scores near zero and not one.

Labelled sets:

- mAP: the finite sum of P at the ranks of the positives, over their number; of the full ranking.
- mAP@R (Musgrave et al. 2020): the same up to rank R, the number of positives of the query.
- R@k: whether a positive is among the first k. mP@k: P(k), or P of the whole gallery if it is smaller.

Revisited Oxford and Paris (Radenović et al. 2018), in three groups. Junk is removed before ranks are counted:

    Easy     positives are the easy images              junk: also the hard ones
    Medium   positives are the easy and the hard images
    Hard     positives are the hard images              junk: also the easy ones

- mAP: the area under the precision-recall curve by trapezoids, as in the published evaluation.
- mP@k: P(min(k, rank of the last positive)).

Google Landmarks v2 (Weyand et al. 2020), of all queries and of both halves:

- mAP@100: the sum of P at the ranks of the positives among the first 100, over their number, at most 100.
- mP@10: P(10).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

AT = (1, 5, 10)  # the k of R@k and mP@k unless others are asked for


@dataclass(frozen=True)
class Ranked:
    """Ranks of the positives of q queries, from 1, ascending and padded with 0."""

    ranks: Int64[Tensor, "q P"]
    others: int  # images that each query is ranked against

    @property
    def count(self) -> Int64[Tensor, " q"]:
        """Number of positives of each query."""
        return (self.ranks > 0).sum(1)

    @property
    def precision(self) -> Float64[Tensor, "q P"]:
        """Precision at the rank of each positive, padded with 0."""
        place = torch.arange(1, self.ranks.shape[1] + 1, device=self.ranks.device).double()
        return torch.where(self.ranks > 0, place / self.ranks.clamp(min=1), 0)

    def hits(self, k: int | Int64[Tensor, " q"]) -> Float64[Tensor, " q"]:
        """Count the positives among the first k of each query; NaN for a query without any."""
        last = torch.as_tensor(k, device=self.ranks.device).view(-1, 1)
        return ((self.ranks > 0) & (self.ranks <= last)).sum(1).double().masked_fill(self.count == 0, torch.nan)

    def interpolated_precision(self) -> Float64[Tensor, "q 101"]:
        """Return the greatest precision at recall r or more, for r = 0, 0.01 ... 1. Each query needs a positive."""
        greatest_behind = self.precision.flip(1).cummax(dim=1).values.flip(1)
        # Recall r needs r x count positives, rounded up; in integers, since 0.07 x 100 is more than 7.
        needed = (torch.arange(101, device=self.ranks.device) * self.count[:, None] + 99) // 100
        return greatest_behind.gather(1, needed.clamp(min=1) - 1)


Figure = Callable[[Ranked], Float64[Tensor, " q"]]  # of each query; NaN for one without a positive


def average_precision(ranked: Ranked, k: int | None = None) -> Float64[Tensor, " q"]:
    """Sum precision at ranks up to k (None takes all), over the number of positives (at most k)."""
    if k is None:
        return ranked.precision.sum(1) / ranked.count  # 0 / 0 is NaN
    return ranked.precision.masked_fill(ranked.ranks > k, 0).sum(1) / ranked.count.clamp(max=k)


def average_precision_at_r(ranked: Ranked) -> Float64[Tensor, " q"]:
    count = ranked.count
    return ranked.precision.masked_fill(ranked.ranks > count[:, None], 0).sum(1) / count


def area_by_trapezoids(ranked: Ranked) -> Float64[Tensor, " q"]:
    """Average, over positives, the precision just before each positive and at it."""
    ranks = ranked.ranks
    place = torch.arange(ranks.shape[1], device=ranks.device).double()  # positives before this one
    from_zero = (ranks - 1).clamp(min=0)
    above = torch.where(from_zero > 0, place / from_zero.clamp(min=1), 1.0)  # 1 if nothing is before it
    heights = torch.where(ranks > 0, (above + (place + 1) / (from_zero + 1)) / 2, 0)
    return heights.sum(1) / ranked.count


def recall(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    return ranked.hits(k).clamp(max=1)


def precision(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    return ranked.hits(k) / min(k, ranked.others)


def precision_to_last(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    shown = ranked.ranks.amax(1).clamp(max=k)
    return ranked.hits(shown) / shown


def precision_of_k(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    return ranked.hits(k) / k


@dataclass(frozen=True)
class Protocol:
    """The figures of a kind of data set, and how to compute them."""

    figures: Mapping[str, Figure]  # by name; the first says which queries have no positive
    groups: Mapping[str, Sequence[int] | None] = field(default_factory=lambda: {"": None})
    """Grades that count as positive, by the prefix of their figures' names; other positives are then junk. None
    stands for all."""
    parts: tuple[str, ...] = ()  # of the queries, whose means are figures too


def labelled_figures(at: Sequence[int] = AT) -> Protocol:
    """Return mAP, mAP@R, and R@k and mP@k for each k of `at`."""
    found = {f"{name}@{k}": partial(figure, k=k) for name, figure in (("R", recall), ("mP", precision)) for k in at}
    return Protocol({"mAP": average_precision, "mAP@R": average_precision_at_r, **found})


REVISITED = Protocol(
    {"mAP": area_by_trapezoids} | {f"mP@{k}": partial(precision_to_last, k=k) for k in AT},
    {"Easy": (0,), "Medium": (0, 1), "Hard": (1,)},
)
LANDMARKS = Protocol(
    {"mAP@100": partial(average_precision, k=100), "mP@10": partial(precision_of_k, k=10)},
    parts=("Public", "Private"),
)
