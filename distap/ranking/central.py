"""Ranking on rank 0 alone."""

import torch

from distap.errors import DistapError
from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered
from distap.ranking.protocol import Loss, LossValue


def rank_on_rank_zero(loss: Loss, gathered: Gathered, budget: Budget) -> LossValue:
    """What a single process would get from the whole batch, given to each rank in part.

    Raises:
        Exception: whatever went wrong on rank 0 there, and a DistapError on the others.
    """
    world, slots = gathered.world, len(gathered.taking_part)
    value = torch.zeros((), dtype=torch.float64, device=gathered.gallery.device)
    by_query = torch.zeros(len(gathered.labels), dtype=torch.float64, device=value.device)
    gradient = None
    is_by_query = True
    failure: Exception | None = None
    if world.rank == 0:
        try:
            whole = gathered.on_one_rank()
            value, per_query, rows = loss.value_and_gradient(whole, budget)
            is_by_query = per_query is not None
            by_query = by_query if per_query is None else per_query
            gradient = whole.spread(rows)
        except Exception as error:
            failure = error
    # Raised on every rank: the others would wait for rank 0.
    if not world.all_agree(failure is None):
        raise failure or DistapError("rank 0 could not rank the batch; its message says why")
    is_by_query = world.all_agree(is_by_query)
    local = gathered.taking_part[world.rank :: world.size]
    received = world.scatter_rows(gradient, gathered.gallery, slots)[local]
    value, by_query = world.broadcast(value), world.broadcast(by_query)
    return LossValue(value, by_query[gathered.own] if is_by_query else None, received)
