"""Exact figures of retrieval by name, computed from the ranks of each query's positives.

Public codebases disagree, so here are the definitions. Ranks count from 1, without the query itself and without junk.
P(k) is the share of positives among the first k, N the number of a query's positives. A query without any is left out
of the means and counted. A positive ranks after the negatives that it ties with, so that a network that maps all
images to one descriptor scores near zero and not one; `ties="for"` of `evaluate_descriptors` ranks it before them.

- mAP: the sum of P at the ranks of the positives, over N; of the full ranking.
- mAP@R (Musgrave et al. 2020): the sum of P at the positives up to rank N, over N.
- mAP@100, or any k: the sum of P at the positives up to rank k, over min(N, k), as Google Landmarks v2 (Weyand et al.
  2020) and, where no positives tie, ILIAS (2025) have it.
- mAP/trapezoids: the area under the precision-recall curve by trapezoids, as in Revisited Oxford and Paris (Radenović
  et al. 2018).
- R@1, or any k: whether a positive is among the first k. CMC@k is the same by the name that re-identification uses.
- mP@5, or any k: P(k), or P of the whole gallery if it is smaller; mP@5/min: hits among the first min(N, k), over
  min(N, k), as GUIE and UnED have it; mP@5/last: P(min(k, rank of the last positive)), as Revisited Oxford and Paris.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from distap.errors import DistapError

AT = (1, 5, 10)  # the k of R@k and mP@k unless others are asked for
REVISITED = ("mAP/trapezoids", *(f"mP@{k}/last" for k in AT))
LANDMARKS = ("mAP@100", "mP@10")
LAST_RANK = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Ranked:
    """Ranks of the positives of q queries, from 1, ascending and padded with 0."""

    ranks: Int64[Tensor, "q P"]
    others: int  # images that each query is ranked against

    @classmethod
    def by_negatives(cls, before: Int64[Tensor, "q P"], exists: Bool[Tensor, "q P"], others: int) -> "Ranked":
        """Rank positives in any order by the number of negatives before each."""
        ascending = before.masked_fill(~exists, LAST_RANK).sort(dim=1).values
        place = torch.arange(1, before.shape[1] + 1, device=before.device)
        return cls(torch.where(ascending < LAST_RANK, ascending + place, 0), others)

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


def average_precision(ranked: Ranked, k: int | Int64[Tensor, " q"]) -> Float64[Tensor, " q"]:
    last = torch.as_tensor(k, device=ranked.ranks.device)
    counted = ranked.precision.masked_fill(ranked.ranks > last.view(-1, 1), 0)
    return counted.sum(1) / ranked.count.minimum(last)  # 0 / 0 is NaN


def area_by_trapezoids(ranked: Ranked) -> Float64[Tensor, " q"]:
    """Average, over positives, the precision just before each positive and at it."""
    ranks = ranked.ranks
    place = torch.arange(ranks.shape[1], device=ranks.device).double()  # positives before this one
    from_zero = (ranks - 1).clamp(min=0)
    above = torch.where(from_zero > 0, place / from_zero.clamp(min=1), 1.0)  # 1 if nothing is before it
    heights = torch.where(ranks > 0, (above + (place + 1) / (from_zero + 1)) / 2, 0)
    return heights.sum(1) / ranked.count


def precision_to_last(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    shown = ranked.ranks.amax(1).clamp(max=k)
    return ranked.hits(shown) / shown


def precision_of_few(ranked: Ranked, k: int) -> Float64[Tensor, " q"]:
    shown = ranked.count.clamp(max=k)
    return ranked.hits(shown) / shown


Figure = Callable[[Ranked, int], Float64[Tensor, " q"]]  # of each query; NaN for one without a positive
FIGURES: dict[str, Figure] = {
    "mAP": lambda ranked, _: average_precision(ranked, LAST_RANK),
    "mAP@R": lambda ranked, _: average_precision(ranked, ranked.count),
    "mAP@k": average_precision,
    "mAP/trapezoids": lambda ranked, _: area_by_trapezoids(ranked),
    "R@k": lambda ranked, k: ranked.hits(k).clamp(max=1),
    "CMC@k": lambda ranked, k: ranked.hits(k).clamp(max=1),
    "mP@k": lambda ranked, k: ranked.hits(k) / min(k, ranked.others),
    "mP@k/min": precision_of_few,
    "mP@k/last": precision_to_last,
}


def figures_named(names: Iterable[str]) -> dict[str, Callable[[Ranked], Float64[Tensor, " q"]]]:
    """Return how to compute each figure; raise a DistapError that lists all names if one is unknown."""
    return {name: _figure(name) for name in names}


def _figure(name: str) -> Callable[[Ranked], Float64[Tensor, " q"]]:
    found = re.search(r"(?<=@)[1-9][0-9]{0,8}", name)
    kind = name if found is None else name.replace(found[0], "k")
    if kind not in FIGURES or (found is None and "@k" in kind):
        raise DistapError(f"there is no figure {name!r:.60}; expected {', '.join(FIGURES)}, with a number for k")
    return lambda ranked: FIGURES[kind](ranked, int(found[0]) if found else 0)


def labelled_figures(at: Sequence[int] = AT) -> tuple[str, ...]:
    """Return the names mAP, mAP@R, and R@k and mP@k for each k of `at`."""
    return "mAP", "mAP@R", *(f"{name}@{k}" for name in ("R", "mP") for k in at)
