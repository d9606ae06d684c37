"""Losses that need a query's whole row of similarities at once.

They are means over queries. A block of rows of similarities goes in; the loss of each query and its derivative by
each similarity come out, G. The gradient of the descriptors is G D for the block's own rows and the transpose of
G times the block's descriptors for the gallery's; over ranks, the gallery's part is summed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered
from distap.ranking.protocol import LossValue
from distap.ranking.weights import Weights, class_sizes, query_weights
from distap.world import World


@dataclass(frozen=True)
class Rows:
    """Some queries against the whole gallery.

    A query's class has at most P gallery images, itself among them; those of a smaller one are padded.
    """

    similarities: Float[Tensor, "r N"]
    queries: Int64[Tensor, " r"]  # columns of the queries themselves
    same_class: Int64[Tensor, "r P"]  # columns of the images of the query's class; padding repeats the query's
    is_positive: Bool[Tensor, "r P"]  # which of them are positives: no padding, and the query only if it counts
    weights: Float[Tensor, " r"]  # of the queries; they sum to 1 over all blocks and ranks
    pairs: int  # of all blocks of this rank together

    @cached_property
    def negatives(self) -> Float[Tensor, "r N"]:
        """The similarities, with -inf for what is no negative."""
        return self.similarities.scatter(1, self.same_class, -torch.inf)

    @cached_property
    def positives(self) -> Float[Tensor, "r P"]:
        """Similarities of the columns `same_class`."""
        return self.similarities.gather(1, self.same_class)

    @cached_property
    def counted_positives(self) -> Float[Tensor, "r P"]:
        """The same, with -inf for what is no positive."""
        return self.positives.masked_fill(~self.is_positive, -torch.inf)

    @cached_property
    def positive_count(self) -> Float[Tensor, "r 1"]:
        """Number of positives of each query, at least 1."""
        return self.is_positive.sum(1, keepdim=True).clamp(min=1).to(self.similarities.dtype)

    def without_query(self) -> "Rows":
        """The same, with no query among its own positives."""
        return replace(self, is_positive=self.is_positive & (self.same_class != self.queries[:, None]))

    def with_positives(
        self, by_negative: Float[Tensor, "r N"], by_positive: Float[Tensor, "r P"]
    ) -> Float[Tensor, "r N"]:
        """The derivative by each similarity, from that by negatives, 0 elsewhere, and that by positives."""
        return by_negative.scatter_add(1, self.same_class, by_positive * self.is_positive)


@dataclass(frozen=True)
class RowLoss(ABC):
    """A loss by query, from its row of similarities.

    Args:
        self_pair: whether a query counts itself among its positives.
        weights: `uniform`, or `class` so that each class weighs the same.
    """

    self_pair: bool = True
    weights: Weights = "uniform"

    # Read by pydantic where this is a configuration section.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    @abstractmethod
    def by_rows(self, rows: Rows, totals: Float64[Tensor, " totals"]) -> tuple[Tensor, Tensor]:
        """The loss of each query, and the weighted loss's derivative by each similarity.

        Args:
            rows: some queries.
            totals: what `totals` gave, summed over all queries of all ranks.
        Returns:
            (r,) and (r, N).
        """

    @property
    def number_of_totals(self) -> int:
        """How many numbers have to be known of all queries before the derivative of any; 0 saves a pass."""
        return 0

    def totals(self, rows: Rows) -> Float64[Tensor, " totals"]:
        """Those numbers' parts from some queries."""
        return torch.zeros(0, dtype=torch.float64, device=rows.weights.device)

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """Loss of the whole batch, and the gradient of this rank's descriptors."""
        weights = query_weights(gathered, self.weights)
        blocks = _Blocks(gathered, weights, self.self_pair, budget)
        totals = self._totals_of_all(blocks, gathered.world)
        descriptors = gathered.descriptors
        of_gallery = torch.zeros_like(descriptors)  # what this rank's queries want of every image of the batch
        of_queries = torch.zeros_like(descriptors[: len(gathered.own)])
        per_query = weights.new_zeros(len(gathered.own))
        for which, rows in blocks:
            per_query[which], by_similarity = self.by_rows(rows, totals)
            queries = gathered.own[which]
            # An image's similarity to itself is constant: its slope would only change the descriptor's length.
            by_similarity[torch.arange(len(queries), device=queries.device), queries] = 0
            of_queries[which] = by_similarity @ gathered.gallery
            of_gallery.addmm_(by_similarity[:, : len(descriptors)].t(), descriptors[queries])
        own_weights = weights[gathered.own]
        loss = gathered.world.sum((own_weights * per_query).sum())
        per_query = torch.where(own_weights > 0, per_query, torch.nan)
        return LossValue(loss, per_query, of_queries + gathered.sum_own(of_gallery))

    def _totals_of_all(self, blocks: "_Blocks", world: World) -> Float64[Tensor, " totals"]:
        totals = torch.zeros(self.number_of_totals, dtype=torch.float64, device=world.device)
        if self.number_of_totals:
            for _, rows in blocks:
                totals += self.totals(rows)
            world.sum(totals)
        return totals


class _Blocks:
    """This rank's queries, some at a time; those of classes of similar size together, so that padding is little."""

    def __init__(self, gathered: Gathered, weights: Float64[Tensor, " B"], self_pair: bool, budget: Budget) -> None:
        self.gathered, self.weights, self.self_pair = gathered, weights, self_pair
        labels, own = gathered.gallery_labels, gathered.own
        self.by_class = labels.argsort(stable=True)
        in_order = labels[self.by_class]
        self.first = torch.searchsorted(in_order, labels[own])
        self.size = class_sizes(gathered)[own]
        # A query without positive has no loss, so no block.
        queries = (weights[own] > 0).nonzero().flatten()
        self.order = queries[self.size[queries].argsort(stable=True)]
        self.height = budget.rows(len(labels), gathered.gallery.element_size())

    def __iter__(self) -> Iterator[tuple[Int64[Tensor, " r"], Rows]]:
        gallery = self.gathered.gallery
        for start in range(0, len(self.order), self.height):
            which = self.order[start : start + self.height]
            queries = self.gathered.own[which]
            place = torch.arange(int(self.size[which].max()), device=which.device)
            is_padding = place >= self.size[which, None]
            same_class = self.by_class[(self.first[which, None] + place).clamp(max=len(gallery) - 1)]
            same_class = torch.where(is_padding, queries[:, None], same_class)
            is_positive = ~is_padding
            if not self.self_pair:
                is_positive &= same_class != queries[:, None]
            yield (
                which,
                Rows(
                    gallery[queries] @ gallery.t(),
                    queries,
                    same_class,
                    is_positive,
                    self.weights[queries].to(gallery.dtype),
                    len(self.order) * len(gallery),
                ),
            )
