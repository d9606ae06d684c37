"""How a rank's share of a batch is cut into micro-batches, for describe and for replay."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
Rows = slice | Tensor  # of a rank's share: from start to stop, or (n,) int64, ascending
OUT_OF_CPU_MEMORY = ("DefaultCPUAllocator", "could not create a primitive")


@dataclass(frozen=True)
class BackwardPass:
    """Some rows of stage three: their gradient, and their descriptors where the graph was kept."""

    rows: Rows
    gradient: Float[Tensor, "n C"]
    kept: Tensor | None = None
    is_padding: bool = False  # only keeps a rank in step with the others


def cut(start: int, stop: int, size: int) -> list[slice]:
    """Rows start to stop - 1 in micro-batches of `size`, the last one shorter where they do not divide."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def first_of(rows: Rows) -> int:
    """The first of some rows."""
    return int(rows.start if isinstance(rows, slice) else rows[0])


def backward_passes(
    count: int,
    size: int,
    gradient: Callable[[slice], Float[Tensor, "n C"]],
    kept: Mapping[int, Tensor],
    limit: float = 0.0,
    regroup: bool = True,
) -> Iterator[BackwardPass]:
    """The micro-batches of stage three; a rank without gradient has none.

    Kept graphs come first, since they hold memory. Images whose gradient is no longer than `limit` need no replay.

    Args:
        count: b, images of the rank's share.
        size: images in a micro-batch.
        gradient: rows -> dL/d descriptors, asked for when they are needed, each row once.
        kept: by its first row, the descriptors of a micro-batch whose graph is there.
        limit: of the gradient's norm.
        regroup: fill micro-batches up with the images of the next where some are left out; otherwise a micro-batch
            stays as it was cut, and is left out where no image of it has a gradient.
    """
    for first, descriptors in kept.items():
        rows = slice(first, first + len(descriptors))
        of_rows = gradient(rows)
        if _is_longer(of_rows, limit).any():
            yield BackwardPass(rows, of_rows, descriptors)
    others = [rows for rows in cut(0, count, size) if rows.start not in kept]
    if not regroup:
        for rows in others:
            of_rows = gradient(rows)
            if _is_longer(of_rows, limit).any():
                yield BackwardPass(rows, of_rows)
        return
    numbers, waiting = torch.empty(0, dtype=torch.int64), None
    for rows in others:
        of_rows = gradient(rows)
        longer = _is_longer(of_rows, limit)
        numbers = torch.cat([numbers, torch.arange(rows.start, rows.stop)[longer.cpu()]])
        waiting = of_rows[longer] if waiting is None else torch.cat([waiting, of_rows[longer]])
        if len(numbers) >= size:
            yield BackwardPass(_as_rows(numbers[:size]), waiting[:size])
            numbers, waiting = numbers[size:], waiting[size:]
    if waiting is not None and len(numbers):
        yield BackwardPass(_as_rows(numbers), waiting)


def padding(descriptors: Float[Tensor, "b C"]) -> BackwardPass:
    """A micro-batch that changes nothing, for a rank that has none while others do: its first image, gradient 0."""
    return BackwardPass(slice(0, 1), torch.zeros_like(descriptors[:1]), is_padding=True)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; it is handed out once it is known whether another follows."""
    held: list[T] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate what it needed; on the CPU it has no error of its own for that.

    oneDNN's way to say so is that it could not make a convolution's primitive.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_CPU_MEMORY)


def _is_longer(gradient: Float[Tensor, "n C"], limit: float) -> Tensor:
    # What is not a number counts: the update finds out, and all ranks skip the step.
    return torch.logical_not(gradient.norm(dim=1) <= limit)


def _as_rows(numbers: Tensor) -> Rows:
    """The same rows as a slice where none is missing: their pixels need no copy."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
