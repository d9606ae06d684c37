"""Batches to rank in tests."""

import torch
from reference import through_normalisation
from torch import Tensor
from torch.nn.functional import normalize

from distap.ranking.rank import Ranking, rank


def problem(
    seed: int, images: int, classes: int, dimensions: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Random descriptors, in clusters so that all bins occur, and labels of unequal classes in any order.

    There are two classes at least, and one image at least that has another of its class.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=generator) ** 2
    labels[0] = labels[-1]
    labels[1] = labels[0] + 1
    raw = torch.randn(images, dimensions, generator=generator, dtype=dtype)
    return raw + 0.5 * torch.sin(labels[:, None] * torch.arange(1, dimensions + 1)).to(dtype), labels


def rank_raw(raw: Tensor, labels: Tensor, loss: str, **options: object) -> tuple[Ranking, Tensor]:
    """Ranking of the normalised rows by one process, and its gradient by `raw`."""
    ranking = rank(normalize(raw), labels, loss, **options)
    return ranking, through_normalisation(raw, ranking.gradient)
