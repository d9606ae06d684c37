"""Rank a gathered batch on rank 0 alone, or sharded over all ranks."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from distap.ranking.gathered import Gathered
from distap.ranking.weights import require_queries

Mode = Literal["sharded", "central"]


@dataclass(frozen=True)
class Ranking:
    """What stage two tells stage three."""

    loss: Float64[Tensor, ""]  # of the whole global batch, the same on every rank
    per_query: Float64[Tensor, " B"]  # AP of each query, NaN where it has no positive
    gradient: Float[Tensor, "b C"]  # of this rank's rows; with `rank_descriptors`, of all its slots
    is_finite: bool = True

    @property
    def queries(self) -> int:
        """Number of queries that have a positive."""
        return int((~self.per_query.isnan()).sum())

    @property
    def skipped_queries(self) -> int:
        """Number of images without another image of their class in the batch."""
        return len(self.per_query) - self.queries


@runtime_checkable
class Loss(Protocol):
    """A listwise loss: a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    def value_and_gradient(self, gathered: Gathered) -> Ranking:
        """Loss of the whole batch and the gradient of `gathered.own`'s descriptors.

        The loss is a mean over all queries of all ranks, so gradients are to be summed over ranks, never
        averaged.
        """
        ...


@torch.no_grad()
def rank_descriptors(loss: Loss, gathered: Gathered, mode: Mode = "sharded") -> Ranking:
    """Loss and descriptor gradients of a global batch (Revaud et al. 2019, section 3.2, second stage).

    Args:
        loss: the listwise loss.
        gathered: the batch; its dtype is the precision of similarities and gradients.
        mode: `sharded`, each rank ranks its own queries; `central`, rank 0 ranks all and scatters the rows.
    Returns:
        A Ranking whose gradient has a row for each slot of this rank, zero for those that take no part.
    Raises:
        DistapError: no query has a positive; raised on every rank.
    """
    # On every rank alike: where rank 0 alone found out, the others would wait for it.
    require_queries(gathered.labels)
    world = gathered.world
    with torch.autocast(gathered.descriptors.device.type, enabled=False):
        if mode == "sharded" or world.size == 1:
            ranking = _with_all_slots(loss.value_and_gradient(gathered), gathered)
        else:
            ranking = _rank_on_rank_zero(loss, gathered)
    finite = bool(ranking.loss.isfinite()) and bool(ranking.gradient.isfinite().all())
    return replace(ranking, is_finite=world.all_agree(finite))


def _rank_on_rank_zero(loss: Loss, gathered: Gathered) -> Ranking:
    world = gathered.world
    per_query = gathered.labels.new_empty(len(gathered.labels), dtype=torch.float64)
    value = per_query.new_empty(())
    gradient = None
    if world.rank == 0:
        whole = gathered.on_one_rank()
        ranking = _with_all_slots(loss.value_and_gradient(whole), whole)
        value, per_query, gradient = ranking.loss, ranking.per_query, ranking.gradient
    rows = world.scatter_rows(gradient, gathered.descriptors, len(gathered.taking_part))
    return Ranking(world.broadcast(value), world.broadcast(per_query), rows)


def _with_all_slots(ranking: Ranking, gathered: Gathered) -> Ranking:
    return replace(ranking, gradient=gathered.spread(ranking.gradient))
