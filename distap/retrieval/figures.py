"""Exact figures of retrieval by name, computed from the ranks of each query's positives.

Public codebases disagree, so here are the definitions. Ranks count from 1, without the query itself
and without junk. P(k) is the share of positives among the first k, N the number of a query's
positives. A query without any is left out of the means and counted. A positive ranks after the
negatives that it ties with, so that a network that maps all images to one descriptor scores near
zero and not one; `ties="for"` of `evaluate_descriptors` ranks it before them.

- mAP: the sum of P at the ranks of the positives, over N; of the full ranking.
- mAP@R (Musgrave et al. 2020): the sum of P at the positives up to rank N, over N.
- mAP@100, or any k: the sum of P at the positives up to rank k, over min(N, k), as Google Landmarks
  v2 (Weyand et al. 2020) and, where no positives tie, ILIAS (2025) have it.
- mAP/trapezoids: the area under the precision-recall curve by trapezoids, as in Revisited Oxford
  and Paris (Radenović et al. 2018).
- R@1, or any k: whether a positive is among the first k. CMC@k is the same by the name that
  re-identification uses.
- mP@5, or any k: P(k), or P of the whole gallery if it is smaller; mP@5/min: hits among the first
  min(N, k), over min(N, k), as GUIE and UnED have it; mP@5/last: P(min(k, rank of the last
  positive)), as Revisited Oxford and Paris.

Graded figures take the relevance l of each positive into account, an integer of at least 1; images
of relevance 0 are negatives. Of positives that tie, the less relevant come first (with
`ties="for"`, the more relevant).

- H-AP (Ramzi et al. 2022): the mean of Hrank(k) / rank(k) over the positives k, weighted by rel(k)
  = l / n_l, where n_l is the number of the query's positives of relevance l. Hrank(k) is the sum of
  min(rel(k), rel(j)) over positives j up to k, including k.
- NDCG: the sum of (2^l - 1) / log2(1 + rank), over that of the ideal ranking.
- ASI (Sun et al. 2021): the mean over k from 1 to N of the share of the first k images that the
  first k of the ideal ranking have too, counted by relevance; ASI/level: without relevance, at each
  level of classes.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from distap.errors import DistapError

# Figures of sets with classes, unless others are asked for.
LABELLED_FIGURES = ("mAP", "mAP@R", "R@1", "R@5", "R@10", "mP@1", "mP@5", "mP@10")
LAST_RANK = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Ranked:
    """Ranks of the positives of q queries, from 1, ascending and padded with 0."""

    ranks: Int64[Tensor, "q P"]
    others: int  # images that each query is ranked against
    grades: Int64[Tensor, "q P"] | None = None  # relevance of each positive; None for 1

    @classmethod
    def by_negatives(
        cls,
        before: Int64[Tensor, "q P"],
        exists: Bool[Tensor, "q P"],
        others: int,
        grades: Int64[Tensor, "q P"] | None = None,
    ) -> "Ranked":
        """Rank positives in any order by the number of negatives before each.

        `grades` are in the order of ranks.
        """
        ascending = before.masked_fill(~exists, LAST_RANK).sort(dim=1).values
        place = torch.arange(1, before.shape[1] + 1, device=before.device)
        return cls(torch.where(ascending < LAST_RANK, ascending + place, 0), others, grades)

    def among(self, grades: Sequence[int]) -> "Ranked":
        """Return the ranks of the positives of some grades; the others are negatives."""
        assert self.grades is not None
        chosen = torch.isin(self.grades, self.grades.new_tensor(grades)) & (self.ranks > 0)
        ranks = self.ranks.masked_fill(~chosen, LAST_RANK).sort(dim=1).values
        return Ranked(ranks.masked_fill(ranks == LAST_RANK, 0), self.others)

    @property
    def count(self) -> Int64[Tensor, " q"]:
        """Number of positives of each query."""
        return (self.ranks > 0).sum(1)

    @property
    def precision(self) -> Float64[Tensor, "q P"]:
        """Precision at the rank of each positive, padded with 0."""
        place = torch.arange(1, self.ranks.shape[1] + 1, device=self.ranks.device).double()
        return torch.where(self.ranks > 0, place / self.ranks.clamp(min=1), 0)

    @property
    def levels(self) -> Bool[Tensor, "L q P"]:
        """Masks of the positives that have relevance 1, 2 ... L."""
        if self.grades is None:
            grades = self.ranks.clamp(max=1)
        else:
            grades = self.grades.masked_fill(self.ranks == 0, 0)
        return torch.stack([grades == level for level in range(1, max(1, int(grades.max())) + 1)])

    def hits(self, k: int | Int64[Tensor, "..."]) -> Float64[Tensor, " q"]:
        """Count the positives among the first k of each query; NaN for a query without any."""
        last = torch.as_tensor(k, device=self.ranks.device).view(-1, 1)
        hits = ((self.ranks > 0) & (self.ranks <= last)).sum(1)
        return hits.double().masked_fill(self.count == 0, torch.nan)


def average_precision(ranked: Ranked, k: int | Int64[Tensor, " q"]) -> Float64[Tensor, " q"]:
    last = torch.as_tensor(k, device=ranked.ranks.device)
    counted = ranked.precision.masked_fill(ranked.ranks > last.view(-1, 1), 0)
    return counted.sum(1) / ranked.count.minimum(last)  # 0 / 0 is NaN


def area_by_trapezoids(ranked: Ranked) -> Float64[Tensor, " q"]:
    """Average, over positives, the precision just before each positive and at it."""
    ranks = ranked.ranks
    place = torch.arange(ranks.shape[1], device=ranks.device).double()  # positives before this one
    from_zero = (ranks - 1).clamp(min=0)
    # 1 if nothing is before it
    above = torch.where(from_zero > 0, place / from_zero.clamp(min=1), 1.0)
    heights = torch.where(ranks > 0, (above + (place + 1) / (from_zero + 1)) / 2, 0)
    return heights.sum(1) / ranked.count


def precision(ranked: Ranked, k: int, limit: int | Int64[Tensor, " q"]) -> Float64[Tensor, " q"]:
    """Return the share of positives among the first min(k, limit)."""
    shown = torch.as_tensor(limit, device=ranked.ranks.device).clamp(max=k)
    return ranked.hits(shown) / shown


def hierarchical_average_precision(ranked: Ranked, _: int) -> Float64[Tensor, " q"]:
    levels = ranked.levels.double()
    numbers = torch.arange(1, len(levels) + 1, device=levels.device).double()
    weights = numbers[:, None] / levels.sum(2).clamp(min=1)
    relevance = (levels * weights[:, :, None]).sum(0)
    # Hrank(k), level by level: its positives up to k, each times the smaller of rel(k) and the
    # level's relevance.
    up_to = torch.minimum(relevance, weights[:, :, None]) * levels.cumsum(2)
    return (up_to.sum(0) / ranked.ranks.clamp(min=1) * (relevance > 0)).sum(1) / relevance.sum(1)


def discounted_gain(ranked: Ranked, _: int) -> Float64[Tensor, " q"]:
    levels = ranked.levels.double()
    numbers = torch.arange(1, len(levels) + 1, device=levels.device)
    gains = (levels * (2.0 ** numbers[:, None, None] - 1)).sum(0)
    place = torch.arange(1, gains.shape[1] + 1, device=gains.device).double()
    ideal = gains.sort(dim=1, descending=True).values / torch.log2(1 + place)
    return (gains / torch.log2(1.0 + ranked.ranks.clamp(min=1).double())).sum(1) / ideal.sum(1)


def set_intersection(ranked: Ranked, _: int) -> Float64[Tensor, " q"]:
    levels = ranked.levels.long()
    places = torch.arange(1, ranked.ranks.shape[1] + 1, device=ranked.ranks.device)
    # Column 0 takes padding and ranks beyond the last place, and is cut off after the sum.
    shown = torch.where(ranked.ranks > len(places), 0, ranked.ranks).expand(levels.shape)
    first = levels.new_zeros(*levels.shape[:2], len(places) + 1)
    first = first.scatter_add_(2, shown, levels)[:, :, 1:].cumsum(2)
    # The ideal ranking has higher levels first: a level gets what they leave of the first k, up to
    # all that it has.
    counts = levels.sum(2, keepdim=True)
    above = counts.flip(0).cumsum(0).flip(0) - counts
    ideal = (places - above).clamp(min=0).minimum(counts)
    shares = first.minimum(ideal).sum(0) / places.double()
    return shares.masked_fill(places > ranked.count[:, None], 0).sum(1) / ranked.count


# of each query; NaN for one without a positive
Figure = Callable[[Ranked, int], Float64[Tensor, " q"]]
GRADED: dict[str, Figure] = {
    "H-AP": hierarchical_average_precision,
    "NDCG": discounted_gain,
    "ASI": set_intersection,
}
FIGURES: dict[str, Figure] = {
    "mAP": lambda ranked, _: average_precision(ranked, LAST_RANK),
    "mAP@R": lambda ranked, _: average_precision(ranked, ranked.count),
    "mAP@k": average_precision,
    "mAP/trapezoids": lambda ranked, _: area_by_trapezoids(ranked),
    "R@k": lambda ranked, k: ranked.hits(k).clamp(max=1),
    "CMC@k": lambda ranked, k: ranked.hits(k).clamp(max=1),
    "mP@k": lambda ranked, k: precision(ranked, k, ranked.others),
    "mP@k/min": lambda ranked, k: precision(ranked, k, ranked.count),
    "mP@k/last": lambda ranked, k: precision(ranked, k, ranked.ranks.amax(1)),
    "ASI/level": set_intersection,
    **GRADED,
}


def figures_named(names: Iterable[str]) -> dict[str, Callable[[Ranked], Float64[Tensor, " q"]]]:
    """Return how to compute each figure; a DistapError for an unknown one lists all names."""
    return {name: _figure(name) for name in names}


def _figure(name: str) -> Callable[[Ranked], Float64[Tensor, " q"]]:
    number = re.search(r"(?<=@)[1-9][0-9]{0,8}", name)
    kind = name if number is None else name.replace(number[0], "k")
    if kind not in FIGURES or (number is None and "@k" in kind):
        raise DistapError(
            "evaluation.unknown_figure",
            f"there is no figure {name!r:.60}; expected {', '.join(FIGURES)}, with a number for k",
        )
    k = int(number[0]) if number else 0
    return lambda ranked: FIGURES[kind](ranked, k)
