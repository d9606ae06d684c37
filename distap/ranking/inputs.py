"""What a caller knows of this rank's images, next to their pixels or descriptors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from distap.errors import DistapError, tensor_given
from distap.ranking.loss import Loss
from distap.ranking.rankable import MOST_ROWS, row_names
from distap.world import World, lengthened

TensorLike = Tensor | ArrayLike
Extra = Mapping[str, TensorLike]


class Inputs:
    """Labels, sample numbers and further tensors of b images, as a caller gives them.

    Args:
        labels: (b,) integers from 0, or (b, L) from the finest level to the coarsest.
        samples: (b,) numbers by which a memory knows images again; None if they have none.
        extra: further tensors, (b, ...), by the names under which the loss takes them.
    Raises:
        DistapError: one of them makes no tensor of numbers.
    """

    def __init__(self, labels: TensorLike, samples: TensorLike | None, extra: Extra | None) -> None:
        self.labels = tensor_given(labels, "labels")
        self.samples = None if samples is None else tensor_given(samples, "samples")
        self.extra = {
            name: tensor_given(rows, f"extra: {name}") for name, rows in (extra or {}).items()
        }

    def check(self, count: int, loss: Loss) -> None:
        """Raise a DistapError unless these are of `count` images, and what the loss takes."""
        self._check_labels(count)
        samples = self.samples
        if samples is not None and (samples.shape != (count,) or samples.is_floating_point()):
            raise DistapError(
                "data.wrong_samples",
                f"samples are {tuple(samples.shape)} of {samples.dtype}; a whole number for each"
                f" of {count} images is expected",
            )
        self._check_extra(count, loss.extras)

    def _check_labels(self, count: int) -> None:
        labels = self.labels
        has_rows = labels.ndim in (1, 2) and len(labels) == count
        if not (has_rows and labels[:1].numel() >= min(count, 1)):
            raise DistapError(
                "data.wrong_labels",
                f"labels are {tuple(labels.shape)} for {count} images; ({count},), or ({count}, L)"
                " for L levels, is expected",
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise DistapError(
                "data.wrong_labels",
                f"labels are {labels.dtype}; whole class numbers of an integer type are expected",
            )
        # As int64, an unsigned number beyond its range is negative; so is one that overflowed
        # before.
        wrong = labels.long() < 0
        if wrong.any():
            values = labels[wrong][:MOST_ROWS].cpu().numpy()
            rows = row_names(wrong.view(count, -1).any(dim=1))
            raise DistapError(
                "data.wrong_labels",
                f"{rows}: labels {', '.join(map(str, values))} are no class numbers, which run from"
                f" 0 to {2**63 - 1}; an overflow of integers may have made them",
            )

    def _check_extra(self, count: int, names: Sequence[str]) -> None:
        lacking = [name for name in names if name not in self.extra]
        if lacking:
            raise DistapError(
                "data.wrong_extra",
                f"the loss takes {', '.join(lacking)} of each image; extra has"
                f" {', '.join(self.extra) or 'nothing'}",
            )
        for name, rows in self.extra.items():
            problem = None
            if name not in names:
                problem = f", but the loss takes {', '.join(names) or 'no tensors of images'}"
            elif not rows.ndim or len(rows) != count:
                problem = f" for {count} images; a row for each is expected"
            elif rows.requires_grad:
                problem = " and requires a gradient, which it would not get; detach() it"
            if problem:
                raise DistapError(
                    "data.wrong_extra", f"extra: {name} is {tuple(rows.shape)}{problem}"
                )

    def kind(self, loss: Loss, **tensors: Tensor) -> tuple[str, str]:
        """Describe what has to be the same on all ranks: shapes, types, and the loss."""

        def shape(rows: Tensor) -> str:
            return f"({', '.join(['b', *map(str, rows.shape[1:])])})"

        tensors |= self.extra
        named = [f"{name} {shape(rows)} of {rows.dtype}" for name, rows in sorted(tensors.items())]
        shapes = ", ".join([f"labels {shape(self.labels)}", *named])
        # Two ranks hold a function of the same name at different addresses.
        return shapes, re.sub(r" at 0x\w+", "", repr(loss))

    def padded(self, share: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return labels, which rows are images, and sample numbers, of `share` rows on the CPU.

        All ranks gather as many rows: those that fill a smaller share up take no part.
        """
        labels = self.labels.cpu().long()
        is_image = torch.arange(share) < len(labels)
        samples = torch.full((len(labels),), -1) if self.samples is None else self.samples
        return lengthened(labels, share), is_image, lengthened(samples.cpu().long(), share)


@dataclass
class View:
    """Hold the value of this rank and its kind, which has to be the same on all ranks."""

    kind: Sequence[str] = ()
    value: Any = None  # JSON
    values: list[Any] = field(default_factory=list)  # of all ranks, after `agreement`


@contextmanager
def agreement(world: World, caught: type[Exception] = Exception) -> Iterator[View]:
    """Exchange the View of this rank, which the block fills in, with those of all ranks.

    An error in the block of one rank becomes a DistapError of all, since the others would wait for
    it in the next collective.
    """
    view = View()
    problem: Exception | None = None
    try:
        yield view
    except caught as error:  # such as one of a caller's iterator
        problem = error
    view.values = world.agreed(problem, view.kind, view.value)
