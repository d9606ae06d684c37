"""Batches to rank in tests."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from distap.ranking.gather import gather
from distap.ranking.loss import Loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import Ranking, rank
from distap.world import World


def problem(
    seed: int, images: int, classes: int, dimensions: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Random descriptors, in clusters so that all bins occur, and labels of unequal classes in any
    order.

    There are at least two classes, and one image that has another of its class.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=generator) ** 2
    labels[0] = labels[-1]
    labels[1] = labels[0] + 1
    raw = torch.randn(images, dimensions, generator=generator, dtype=dtype)
    return raw + 0.5 * torch.sin(labels[:, None] * torch.arange(1, dimensions + 1)).to(
        dtype
    ), labels


def slots_of_ranks(slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Descriptors, labels and which rows take part; class 9 ends up on one rank only, on 2 or 4
    ranks.
    """
    raw, labels = problem(0, slots, 5, dimensions=6)
    labels[[2, 6, 10]] = 9
    return normalize(raw), labels, torch.ones(slots, dtype=torch.bool)


def rank_raw(
    raw: Tensor, labels: Tensor, loss: str | Loss, **options: object
) -> tuple[Ranking, Tensor]:
    """Ranking of the normalised rows by one process, and its gradient by `raw`."""
    ranking = rank(normalize(raw), labels, loss, **options)
    leaf = raw.detach().clone().requires_grad_()
    normalize(leaf).backward(ranking.gradient)
    assert leaf.grad is not None
    return ranking, leaf.grad


def remembering(
    seed: int, images: int, first: int | None = None, classes: int = 5, **settings: int
) -> CrossBatchMemory:
    """A memory of a batch; its images are numbered from `first`, or have no numbers."""
    raw, labels = problem(seed, images, classes, **settings)
    numbers = None if first is None else torch.arange(first, first + images)
    memory = CrossBatchMemory(1000)
    memory.remember(
        gather(
            normalize(raw), labels, torch.ones(images, dtype=torch.bool), World(), images, numbers
        )
    )
    return memory
