"""Base classes for losses of similarities or of descriptors.

docs/guides/own-loss.md has examples; docs/guides/losses.md lists what a recipe calls them.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered, PaddedColumns, QueryWeights, runs
from distap.ranking.loss import Budget, Loss, LossValue, rank_on_rank_zero
from distap.ranking.rankable import refuse_other_leaves

# With fewer rows, products of descriptors are slower; more rows leave the cache in the functions
# between.
TILES_OF_A_BLOCK = 8
# Of r queries, which are ranked against N images, of which at most P are of a query's class.
Scores = Float[Tensor, "r N"]
Mask = Bool[Tensor, "r N"]
PerQuery = Float[Tensor, " r"]
PerPositive = Float[Tensor, "r P"]
# Sums over the queries of all ranks, of a shape that the loss chooses.
Totals = Float64[Tensor, "..."]


@dataclass(frozen=True)
class Rows:
    """A block of queries against the whole gallery.

    A query's class has at most P gallery images, the query among them; smaller classes are padded.
    So positives are tables of P columns, and what is computed for each positive is not computed for
    all N images:

        similarities (r, N)  | . + . . + - ...     same_class (r, P)   | 1 4 q q     columns,
                             | + . - + . + ...                         | 0 3 5 q     q is padding
    """

    similarities: Float[Tensor, "r N"]
    # class numbers of the gallery, from the finest level to the coarsest
    levels: Int64[Tensor, "N L"]
    # rows of the queries in the batch, which are their own columns in the gallery
    queries: Int64[Tensor, " r"]
    # columns of the images of the query's class; padding repeats the query's
    same_class: Int64[Tensor, "r P"]
    # which of them are positives: no padding, and the query only if it counts
    is_positive: Bool[Tensor, "r P"]
    weights: Float[Tensor, " r"]  # of the queries; they sum to 1 over all blocks and ranks
    pairs: int  # of all blocks of this rank together
    extra: Mapping[str, Tensor]  # further tensors of the queries, (r, ...)
    tie_width: float  # difference up to which two similarities tie

    @cached_property
    def negatives(self) -> Scores:
        """Return the similarities to negatives, with -inf in the columns of the query's class."""
        return self.similarities.scatter(1, self.same_class, -torch.inf)

    @cached_property
    def positives(self) -> PerPositive:
        """Return the similarities to images of the query's class, by `same_class`."""
        return self.similarities.gather(1, self.same_class)

    @cached_property
    def positive_count(self) -> Float[Tensor, "r 1"]:
        return self.is_positive.sum(1, keepdim=True).clamp(min=1).to(self.similarities.dtype)

    @cached_property
    def positive_columns(self) -> Mask:
        # A sum, since padding names the query's column again.
        times = torch.zeros(self.similarities.shape, dtype=torch.int32, device=self.queries.device)
        return times.scatter_add_(1, self.same_class, self.is_positive.int()) > 0

    @cached_property
    def negative_columns(self) -> Mask:
        return torch.ones_like(self.positive_columns).scatter_(1, self.same_class, False)

    def without_query(self) -> "Rows":
        """Return these rows with each query left out of its own positives."""
        return replace(
            self, is_positive=self.is_positive & (self.same_class != self.queries[:, None])
        )

    def with_positives(self, by_negative: Scores, by_positive: PerPositive) -> Scores:
        """Add slopes by positives, in place, to those by negatives, which are 0 elsewhere."""
        return by_negative.scatter_add_(1, self.same_class, by_positive * self.is_positive)


@dataclass(frozen=True, kw_only=True)  # a first number is for a subclass's own first field
class SimilarityLoss(Loss):
    """A mean over queries of a function of each query's similarities to the whole gallery.

    A subclass writes `loss`, and autograd differentiates it; or it writes `value_and_slopes`, with
    a derivative by hand that takes less memory. The queries are ranked a block at a time, each rank
    its own.
    """

    self_pair: bool = True
    """Count a query among its own positives."""
    weights: QueryWeights = "uniform"
    """Weigh all queries alike (uniform), all classes (class), or as `extra` says (given)."""
    formula: ClassVar[tuple[str, int]] = ("loss", 3)
    asymmetric: ClassVar[bool] = True

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        """Return the loss of each of r queries, differentiable by the similarities.

        Further parameters without a default take rows (r, ...) of the queries' `extra` tensors of
        that name.

        Args:
            similarities: (r, N) to the whole gallery of N images, in any order.
            positive: which are of the query's class; the query itself is one of them if
                `self_pair`.
            negative: which are of another class.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define `loss` or `value_and_slopes`"
        )

    def loss_of_rows(self, similarities: Scores, rows: Rows) -> Tensor:
        """Return `loss` of a block, differentiable by `similarities`, which are those of the rows.

        A loss that compares similarities overrides this to see the rows' tie width.
        """
        return self.loss(similarities, rows.positive_columns, rows.negative_columns, **rows.extra)

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[Tensor, ...]:
        """Return each query's loss, (r,), and the weighted sum's slope by similarities, (r, N).

        Derivatives by each of `parameters` follow. `totals` are what the method `totals` gave,
        summed over all queries of all ranks.
        """
        with torch.enable_grad():
            similarities = rows.similarities.detach().requires_grad_()
            value = self.loss_of_rows(similarities, rows)
            if value.shape != rows.weights.shape:
                raise DistapError(
                    "loss.wrong_shape",
                    f"{type(self).__name__} gave shape {tuple(value.shape)}; expected"
                    f" {tuple(rows.weights.shape)}: one value a query",
                )
            slopes = gradients((rows.weights * value).sum(), similarities, *self.parameters)
        return value.detach(), *slopes

    def shape_of_totals(self, columns: int) -> tuple[int, ...]:
        """Return the shape of the sums over all queries that `value_and_slopes` needs, if any."""
        return (0,)

    def totals(self, rows: Rows) -> Totals:
        """Return what a block adds to these sums."""
        raise NotImplementedError

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        weights = gathered.query_weights(self.weights, 1 + self.needs_positives, self.query_level)
        gallery = gathered.gallery
        batch = len(gathered.samples)
        totals = weights.new_zeros(self.shape_of_totals(len(gallery)))
        if totals.numel():
            for _, rows in self.blocks(gathered, weights, budget):
                totals += self.totals(rows)
            gathered.world.sum(totals)
        # With Q a block's own descriptors, D the gallery and G = dL/d(Q Dᵀ), (r, N):
        #
        #     dL/dQ = G D      rows of this rank, block by block
        #     dL/dD = Gᵀ Q     all rows, summed over blocks and ranks
        #
        # A block is forgotten before the next one, so memory holds r N pairs, whatever the batch.
        # What a memory remembers of earlier steps gets no gradient, nor do the descriptors of
        # another network, whose part of the sum is left out.
        own_weights = weights[gathered.own]
        of_batch = torch.zeros_like(gathered.descriptors)
        by_queries = torch.zeros_like(of_batch[: len(own_weights)])
        per_query = torch.zeros_like(own_weights)
        by_parameters = [torch.zeros_like(parameter) for parameter in self.parameters]
        for numbers, rows in self.blocks(gathered, weights, budget):
            values, slopes, *of_parameters = self.value_and_slopes(rows, totals)
            per_query[numbers] = values.double()
            for total, addend in zip(by_parameters, of_parameters, strict=True):
                total += addend
            # Its own similarity is constant at length 1: the slope would only change the
            # descriptor's length.
            if gathered.of_unit_length:
                slopes[torch.arange(len(numbers), device=numbers.device), rows.queries] = 0
            if gathered.fixed != "queries":
                by_queries[numbers] = slopes @ gallery
            if gathered.fixed != "gallery":
                of_batch.addmm_(slopes[:, :batch].t(), gathered.queries[rows.queries])
        sums = [gathered.world.sum(total.to(gallery)).to(total) for total in by_parameters]
        if gathered.fixed != "gallery":
            # One reduce-scatter of B C numbers, which the histograms' losses do without: their
            # slopes are symmetric. An image gets both: what it wants as a query, and what the
            # queries of all ranks want of it.
            by_queries += gathered.sum_own(of_batch)
        return LossValue(
            value=gathered.world.sum((own_weights * per_query).sum()),
            per_query=torch.where(own_weights > 0, per_query, torch.nan),
            gradient=by_queries,
            by_parameters=tuple(sums),
        )

    def blocks(
        self,
        gathered: Gathered,
        weights: Float64[Tensor, " B"],
        budget: Budget,
    ) -> Iterator[tuple[Int64[Tensor, " r"], Rows]]:
        """Yield this rank's queries in blocks, with their row numbers in `own`."""
        # They are ordered by the size of their class: `same_class` has as many columns as the
        # largest class of a block, so that one large class pads few others.
        gallery = gathered.gallery
        own_rows = gathered.own
        counted = (weights[own_rows] > 0).nonzero().flatten()
        order = counted[gathered.class_sizes[own_rows[counted], 0].argsort(stable=True)]
        height = max(1, budget.pairs(gallery.element_size(), TILES_OF_A_BLOCK) // len(gallery))
        for numbers in order.split(height) if len(order) else ():
            queries = own_rows[numbers]
            same_class, is_positive = self._columns(gathered, queries)
            yield (
                numbers,
                Rows(
                    similarities=gathered.queries[queries] @ gallery.t(),
                    levels=gathered.gallery_levels,
                    queries=queries,
                    same_class=same_class,
                    is_positive=is_positive,
                    weights=weights[queries].to(gallery.dtype),
                    pairs=len(order) * len(gallery),
                    extra={name: gathered.extra[name][queries] for name in self.taken},
                    tie_width=gathered.tie_width,
                ),
            )

    def _columns(self, gathered: Gathered, queries: Int64[Tensor, " r"]) -> PaddedColumns:
        """Return `same_class` and `is_positive` of a block; see `Rows`."""
        labels, by_class = gathered.by_class
        places, is_positive = runs(labels, gathered.gallery_labels[queries], queries.device)
        same_class = torch.where(is_positive, by_class[places], queries[:, None])
        if not self.self_pair:
            is_positive &= same_class != queries[:, None]
        return same_class, is_positive


def padded_columns(wanted: Mask, padding: Int64[Tensor, " r"]) -> PaddedColumns:
    """Return the columns wanted in each row, ascending, and which are no padding."""
    # `nonzero` goes row by row, so an image's place in its row is its number less the first number
    # of the row: no sort and no loop over rows, whose counts differ.
    count = wanted.sum(1)
    row, column = wanted.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    is_real = torch.arange(max(1, int(count.max())), device=row.device) < count[:, None]
    columns = padding[:, None].repeat(1, is_real.shape[1])
    columns[row, place] = column
    return columns, is_real


@dataclass(frozen=True)
class DescriptorLoss(Loss):
    """A loss of the whole batch's descriptors, which rank 0 computes and autograd differentiates.

    It takes as much memory as `loss` takes, and ranks against no memory of earlier descriptors.
    Query weights do not apply. The parameters of `learned` are trained, if a subclass has such a
    module.
    """

    formula: ClassVar[tuple[str, int]] = ("loss", 2)
    takes_memory: ClassVar[bool | None] = False

    @abstractmethod
    def loss(
        self, descriptors: Float[Tensor, "B C"], labels: Int64[Tensor, " B"]
    ) -> Float[Tensor, ""]:
        """Return the loss of the batch, differentiable by its descriptors.

        Further parameters without a default take the `extra` tensors of the images, (B, ...), of
        that name. Random numbers drawn here depend on seed and step, so that a run that was
        interrupted draws them again.
        """

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        if gathered.world.size > 1:
            return rank_on_rank_zero(self, gathered, budget)
        devices = [gathered.gallery.device] if gathered.gallery.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(gathered.seed)
            descriptors = gathered.descriptors.clone().requires_grad_()
            extra = {name: gathered.extra[name].clone() for name in self.extras}
            value = self.loss(descriptors, gathered.labels.clone(), **extra)
            if value.shape:
                raise DistapError(
                    "loss.wrong_shape",
                    f"{type(self).__name__} gave shape {tuple(value.shape)}; expected a scalar",
                )
            if not value.requires_grad and value:  # without a pair it is 0
                raise DistapError(
                    "loss.no_graph",
                    f"the loss, {value:g}, has no graph: is it detached, or computed outside"
                    " torch?",
                )
            gradient, *by_parameters = gradients(value, descriptors, *self.parameters)
        return LossValue(value.detach().double(), None, gradient, tuple(by_parameters))


def gradients(value: Float[Tensor, ""], *by: Tensor) -> tuple[Tensor, ...]:
    """Return the derivative of a loss by each tensor: zeros if it has none, as without pairs."""
    refuse_other_leaves(
        [value],
        by,
        "the loss closes over it; write the loss as a module that has it as a parameter",
    )
    if not value.requires_grad:
        return tuple(map(torch.zeros_like, by))
    slopes = torch.autograd.grad(value, by, allow_unused=True, materialize_grads=True)
    return tuple(slopes)
