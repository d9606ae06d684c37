"""Gradients of parameters that some ranks, or none, have used."""

from types import SimpleNamespace
from unittest.mock import patch

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


def sums_in_buckets(world):
    """Sums of gradients in messages of 40 bytes, and the bytes of each message."""
    parameters = [torch.zeros(4), torch.zeros(5), torch.zeros(2, 3).t(), torch.zeros(30)]
    parameters += [torch.zeros(3).double(), torch.zeros(1)]
    generator = torch.Generator().manual_seed(world.rank)
    gradients = [
        torch.randn(like.shape, generator=generator).to(like).add_(0) for like in parameters
    ]
    sent = []

    def count(message):
        sent.append(message.numel())
        return world.sum(message)

    counting = SimpleNamespace(sum=count)
    with patch("distap.stages.replica.BUCKET_BYTES", 40):
        return (
            [gradient.clone() for gradient in gradients],
            summed(counting, gradients, parameters),
            sent,
        )


def test_gradients_travel_in_messages_of_bounded_size():
    first, second = on_ranks(2, sums_in_buckets)
    for (here, sums, sent), (there, _, _) in ((first, second), (second, first)):
        for one_here, one_there, total in zip(here, there, sums, strict=True):
            assert torch.equal(one_here + one_there, total)
        # 4 and 5 numbers, 6, 30 which are too many, 1, then the doubles: each with its counts
        assert sent == [9 + 2, 6 + 1, 30 + 1, 1 + 1, 3 + 1]
