"""Base classes for losses of similarities or of descriptors, and a weighted sum of losses.

docs/guides/losses.md has examples, and what a recipe calls them.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.loss import Budget, Gathered, Loss, LossValue, QueryWeights, rank_on_rank_zero
from distap.ranking.rankable import refuse_other_leaves
from distap.registry import Chosen


@dataclass(frozen=True)
class Rows:
    """A block of queries against the whole gallery.

    A query's class has at most P gallery images, the query among them; smaller classes are padded:

        similarities (r, N)  | . + . . + - ...     same_class (r, P)   | 1 4 q q     columns, q is padding
                             | + . - + . + ...                         | 0 3 5 q
    """

    similarities: Float[Tensor, "r N"]
    queries: Int64[Tensor, " r"]  # columns of the queries themselves
    same_class: Int64[Tensor, "r P"]  # columns of the images of the query's class; padding repeats the query's
    is_positive: Bool[Tensor, "r P"]  # which of them are positives: no padding, and the query only if it counts
    weights: Float[Tensor, " r"]  # of the queries; they sum to 1 over all blocks and ranks
    pairs: int  # of all blocks of this rank together

    @cached_property
    def negatives(self) -> Float[Tensor, "r N"]:
        """Return the similarities, with -inf within the query's class."""
        return self.similarities.scatter(1, self.same_class, -torch.inf)

    @cached_property
    def positives(self) -> Float[Tensor, "r P"]:
        """Return the similarities of the columns `same_class`."""
        return self.similarities.gather(1, self.same_class)

    @cached_property
    def counted_positives(self) -> Float[Tensor, "r P"]:
        """Return the similarities of columns `same_class`, with -inf for those that are no positives."""
        return self.positives.masked_fill(~self.is_positive, -torch.inf)

    @cached_property
    def positive_count(self) -> Float[Tensor, "r 1"]:
        return self.is_positive.sum(1, keepdim=True).clamp(min=1).to(self.similarities.dtype)

    @cached_property
    def positive_columns(self) -> Bool[Tensor, "r N"]:
        # A sum, since padding names the query's column again.
        times = torch.zeros(self.similarities.shape, dtype=torch.int32, device=self.queries.device)
        return times.scatter_add_(1, self.same_class, self.is_positive.int()) > 0

    def without_query(self) -> "Rows":
        """Return the same rows without each query among its own positives."""
        return replace(self, is_positive=self.is_positive & (self.same_class != self.queries[:, None]))

    def with_positives(
        self, by_negative: Float[Tensor, "r N"], by_positive: Float[Tensor, "r P"]
    ) -> Float[Tensor, "r N"]:
        """Combine derivatives by negatives (0 elsewhere) and by positives into one by each similarity."""
        return by_negative.scatter_add(1, self.same_class, by_positive * self.is_positive)


@dataclass(frozen=True)
class SimilarityLoss(Loss):
    """A mean over queries of a function of each query's similarities to the whole gallery.

    A subclass writes `loss`, and autograd differentiates it; or it writes `value_and_slopes`, with a derivative by
    hand that takes less memory. The queries are ranked a block at a time, each rank its own.
    """

    self_pair: bool = True
    """Count a query among its own positives."""
    weights: QueryWeights = "uniform"
    """Weigh all queries alike (uniform), or all classes (class)."""

    def loss(
        self, similarities: Float[Tensor, "r N"], positive: Bool[Tensor, "r N"], negative: Bool[Tensor, "r N"]
    ) -> Float[Tensor, " r"]:
        """Return the loss of each of r queries, differentiable by the similarities.

        Args:
            similarities: (r, N) to the whole gallery of N images, in any order.
            positive: which are of the query's class; the query itself is one of them if `self_pair`.
            negative: which are of another class.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define `loss` or `value_and_slopes`")

    def value_and_slopes(self, rows: Rows, totals: Float64[Tensor, " totals"]) -> tuple[Tensor, Tensor]:
        """Return each query's loss, (r,) float64, and the derivative of the weighted sum by similarities, (r, N).

        `totals` are what the method `totals` gave, summed over all queries of all ranks.
        """
        negative = torch.ones_like(rows.positive_columns).scatter_(1, rows.same_class, False)
        with torch.inference_mode(False), torch.enable_grad():
            similarities = rows.similarities.clone().requires_grad_()
            value = self.loss(similarities, rows.positive_columns.clone(), negative.clone())
            if value.shape != rows.weights.shape:
                shapes = f"gave shape {tuple(value.shape)}; expected {tuple(rows.weights.shape)}: one value a query"
                raise DistapError(f"{type(self).__name__} {shapes}")
            (slopes,) = gradients((rows.weights.clone() * value).sum(), similarities)
        return value.detach().double(), slopes

    @property
    def number_of_totals(self) -> int:
        """Number of sums over all queries that `value_and_slopes` needs beforehand; 0 saves a pass."""
        return 0

    def totals(self, rows: Rows) -> Float64[Tensor, " totals"]:
        return torch.zeros(0, dtype=torch.float64, device=rows.weights.device)

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        weights = gathered.query_weights(self.weights)
        totals = weights.new_zeros(self.number_of_totals)
        if self.number_of_totals:
            for _, rows in self._blocks(gathered, weights, budget):
                totals += self.totals(rows)
            gathered.world.sum(totals)
        # With Q a block's own descriptors, D the gallery and G = dL/d(Q Dᵀ), (r, N):
        #
        #     dL/dQ = G D      rows of this rank, block by block
        #     dL/dD = Gᵀ Q     all rows, summed over blocks and then over ranks, each of which keeps its own
        #
        # An image gets both: as a query, and as one that others rank.
        descriptors = gathered.descriptors
        of_gallery = torch.zeros_like(descriptors)  # what this rank's queries want of every image of the batch
        of_queries = torch.zeros_like(descriptors[: len(gathered.own)])
        per_query = weights.new_zeros(len(gathered.own))
        for which, rows in self._blocks(gathered, weights, budget):
            per_query[which], slopes = self.value_and_slopes(rows, totals)
            # An image's similarity to itself is constant: its slope would only change the descriptor's length.
            slopes[torch.arange(len(which), device=which.device), rows.queries] = 0
            of_queries[which] = slopes @ gathered.gallery
            # What a memory remembers, behind the batch in the gallery, gets no gradient.
            of_gallery.addmm_(slopes[:, : len(descriptors)].t(), descriptors[rows.queries])
        own_weights = weights[gathered.own]
        loss = gathered.world.sum((own_weights * per_query).sum())
        per_query = torch.where(own_weights > 0, per_query, torch.nan)
        return LossValue(loss, per_query, of_queries + gathered.sum_own(of_gallery))

    def _blocks(
        self, gathered: Gathered, weights: Float64[Tensor, " B"], budget: Budget
    ) -> Iterator[tuple[Int64[Tensor, " r"], Rows]]:
        # This rank's queries in blocks, with their row numbers in `own`. They are ordered by the size of their class:
        # `same_class` has as many columns as the largest class of a block, so that one large class pads few others.
        gallery, labels, own = gathered.gallery, gathered.gallery_labels, gathered.own
        by_class = labels.argsort(stable=True)
        first = torch.searchsorted(labels[by_class], labels[own])
        size = gathered.class_sizes[own]
        with_positive = (weights[own] > 0).nonzero().flatten()
        order = with_positive[size[with_positive].argsort(stable=True)]
        for which in order.split(max(1, budget.pairs(gallery.element_size()) // len(labels))):
            if not len(which):
                return
            queries = own[which]
            # `by_class` has the gallery sorted by class: that of a query is the run of `size` from `first`.
            place = torch.arange(int(size[which].max()), device=which.device)
            is_positive = place < size[which, None]
            same_class = by_class[(first[which, None] + place).clamp(max=len(gallery) - 1)]
            same_class = torch.where(is_positive, same_class, queries[:, None])
            if not self.self_pair:
                is_positive &= same_class != queries[:, None]
            similarities, weight = gallery[queries] @ gallery.t(), weights[queries].to(gallery.dtype)
            yield which, Rows(similarities, queries, same_class, is_positive, weight, len(order) * len(gallery))


@dataclass(frozen=True)
class DescriptorLoss(Loss):
    """A loss of the whole batch's descriptors, which rank 0 computes and autograd differentiates.

    It takes as much memory as `loss` takes, and ranks against no memory of earlier descriptors. Query weights do not
    apply. The parameters of `learned` are trained, if a subclass has such a module.
    """

    @abstractmethod
    def loss(self, descriptors: Float[Tensor, "B C"], labels: Int64[Tensor, " B"]) -> Float[Tensor, ""]:
        """Return the loss of the batch, differentiable by its descriptors.

        Random numbers drawn here depend on the batch alone, so that a run that was interrupted draws them again.
        """

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        if len(gathered.gallery) > len(gathered.images):
            kind = f"{type(self).__name__} is a loss of the batch's descriptors"
            raise DistapError(f"{kind}, so it cannot rank against a memory of earlier ones")
        if gathered.world.size > 1:
            return rank_on_rank_zero(self, gathered, budget)
        devices = [gathered.gallery.device] if gathered.gallery.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(int(gathered.labels.sum()))
            descriptors = gathered.descriptors.clone().requires_grad_()
            value = self.loss(descriptors, gathered.labels.clone())
            gradient, *others = gradients(value, descriptors, *self.parameters)
        return LossValue(value.detach().double(), None, gradient, tuple(others))


@dataclass(frozen=True)
class WeightedSum(Loss):
    """A sum of losses, each multiplied by a weight."""

    terms: tuple[tuple[float, Annotated[Any, Chosen("loss", at_once=True)]], ...]
    """Weight and loss of each term."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    @cached_property
    def learned(self) -> nn.Module | None:
        parts = [loss.learned for _, loss in self.terms if loss.learned is not None]
        return nn.ModuleList(parts) if parts else None

    def sized(self, classes: int | None, dimensions: int, seed: int) -> Loss:
        return replace(
            self, terms=tuple((weight, loss.sized(classes, dimensions, seed)) for weight, loss in self.terms)
        )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        parts = [(weight, loss.value_and_gradient(gathered, budget)) for weight, loss in self.terms]
        by_query = [weight * part.per_query for weight, part in parts if part.per_query is not None]
        return LossValue(
            reduce(torch.add, [weight * part.value for weight, part in parts]),
            reduce(torch.add, by_query) if len(by_query) == len(parts) else None,
            reduce(torch.add, [weight * part.gradient for weight, part in parts]),
            tuple(weight * one for weight, part in parts for one in part.by_parameters),
        )


def gradients(value: Float[Tensor, ""], *by: Tensor) -> tuple[Tensor, ...]:
    """Return the derivative by each tensor; zeros without one, such as from a loss with no pair left."""
    refuse_other_leaves([value], by, "the loss closes over it; write the loss as a module that has it as a parameter")
    found = torch.autograd.grad(value, by, allow_unused=True) if value.requires_grad else [None] * len(by)
    return tuple(torch.zeros_like(each) if one is None else one for one, each in zip(found, by, strict=True))
