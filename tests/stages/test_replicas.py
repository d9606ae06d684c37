"""Gradients of parameters that some ranks, or none, have used."""

import torch
from ranks import on_ranks

from distap.stages.replica import summed


def sums_on_rank(world):
    """Sums for parameters that no rank, the first rank and all ranks have used."""
    gradients = [None, torch.ones(2) if world.rank == 0 else None, torch.ones(3).double()]
    parameters = [torch.zeros(2), torch.zeros(2), torch.zeros(3).double()]
    return summed(world, gradients, parameters)


def test_a_gradient_that_no_rank_has_stays_missing():
    for unused, of_one, of_all in on_ranks(2, sums_on_rank):
        assert unused is None
        assert torch.equal(of_one, torch.ones(2))
        assert torch.equal(of_all, torch.full((3,), 2.0).double())
