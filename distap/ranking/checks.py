"""Refuse descriptors and labels that cannot be ranked, and say which rows are at fault."""

import torch
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.world import World

LENGTH_TOLERANCE = 0.02  # bfloat16 rounds a descriptor's length by up to 0.4%
MOST_ROWS = 10
LARGEST_LABEL = torch.iinfo(torch.int64).max


def check_arguments(descriptors: Tensor, labels: Tensor, world: World) -> Tensor:
    """The labels as int64.

    Raises:
        DistapError: on all ranks, where shapes or dtypes of any are wrong, or a label is no class number.
    """
    problem = _problem(descriptors, labels)
    at_fault = int(world.maximum(world.rank if problem else -1))
    if at_fault >= 0:
        raise DistapError(problem or f"rank {at_fault} was given descriptors or labels that cannot be ranked")
    if not (world.all_same(descriptors.shape[1]) and world.all_same(descriptors.element_size())):
        kind = f"{descriptors.shape[1]} dimensions of {descriptors.dtype}"
        raise DistapError(f"the ranks were given descriptors of different kinds; rank {world.rank} has {kind}")
    return labels.long()


def _problem(descriptors: Tensor, labels: Tensor) -> str | None:
    if descriptors.ndim != 2 or not descriptors.is_floating_point():
        shape = tuple(descriptors.shape)
        return f"descriptors are {shape} of {descriptors.dtype}; (b, C) of a floating-point type is expected"
    if labels.shape != descriptors.shape[:1]:
        return f"labels are {tuple(labels.shape)} for {len(descriptors)} descriptors; one for each is expected"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return f"labels are {labels.dtype}; whole class numbers of an integer type are expected"
    # Seen as int64, an unsigned number beyond its range is negative; so is one that overflowed before.
    wrong = (labels.long() < 0).nonzero().flatten().tolist()
    if wrong:
        values = [labels[row].cpu().numpy() for row in wrong[:MOST_ROWS]]
        return (
            f"{_rows(wrong)}: labels {', '.join(map(str, values))} are no class numbers, which run from 0 to "
            f"{LARGEST_LABEL}; an overflow of integers may have made them"
        )
    return None


def check_gathered(gathered: Gathered) -> None:
    """Look at the descriptors of all ranks.

    Raises:
        DistapError: on all ranks, where descriptors are not finite or not of length 1.
    """
    lengths = torch.linalg.vector_norm(gathered.descriptors.double(), dim=1)
    wrong = ~lengths.isfinite()
    if wrong.any():
        raise DistapError(
            f"{_where(gathered, wrong)}: descriptors hold values that are not finite (NaN or infinite), so nothing "
            "can be ranked"
        )
    wrong = (lengths - 1).abs() > LENGTH_TOLERANCE
    if wrong.any():
        example = float(lengths[wrong][0])
        raise DistapError(
            f"{_where(gathered, wrong)}: descriptors have other lengths than 1, such as {example:.4g}; normalise "
            "them first (torch.nn.functional.normalize)"
        )


def _where(gathered: Gathered, wrong: Tensor) -> str:
    """The ranks' own row numbers of some rows of a batch."""
    world = gathered.world
    slots = gathered.taking_part.nonzero().flatten()[wrong].tolist()
    if world.size == 1:
        return _rows(slots)
    by_rank = {
        rank: [slot // world.size for slot in slots if slot % world.size == rank] for rank in range(world.size)
    }
    return "; ".join(f"rank {rank}, {_rows(rows)}" for rank, rows in by_rank.items() if rows)


def _rows(rows: list[int]) -> str:
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MOST_ROWS]))}{more}"
