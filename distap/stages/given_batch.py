"""A batch of a loop of one's own, in any nesting of tensors, as the three stages read it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from distap.errors import DistapError
from distap.stages.micro_batches import Rows, as_rows
from distap.world import World


class GivenBatch:
    """One rank's images; a rank with fewer than others repeats its last one, which takes no part."""

    def __init__(
        self, parts: list[Any], labels: Tensor, samples: Sequence[int] | None, share: int, world: World, step: int
    ) -> None:
        self.step, self.total = step, share * world.size
        self._parts = parts
        self._starts = torch.tensor([0, *accumulate(map(rows_of, parts))])
        # Row k of rank r is slot k W + r, so every rank has as many rows as the fullest.
        self._own = torch.arange(share).clamp(max=len(labels) - 1)
        self.labels, self.present = labels[self._own], torch.arange(share) < len(labels)
        self.samples = torch.full((share,), -1) if samples is None else torch.as_tensor(samples)[self._own]
        self._is_blank = torch.zeros(share, dtype=torch.bool)

    def images(self, rows: Rows) -> Any:
        # Rows may lie in several of the caller's parts: pick from each, then join, where all are alike.
        wanted = self._own[rows]
        of_part, pieces = torch.searchsorted(self._starts, wanted, right=True) - 1, []
        for number in of_part.unique().tolist():
            inside = as_rows(wanted[of_part == number] - self._starts[number])
            pieces.append(tree_map_only(Tensor, partial(_picked, inside), self._parts[number]))
        images = pieces[0] if len(pieces) == 1 else tree_map(_joined, *pieces)
        blank = self._is_blank[rows]
        return tree_map_only(Tensor, partial(_blanked, blank), images) if blank.any() else images

    def blank(self, rows: Tensor) -> None:
        self._is_blank[rows.cpu()] = True


def cut_along_rows(images: Any, labels: Tensor | None) -> tuple[list[Any], Tensor]:
    """Cut into nestings of tensors that can be cut along their first dimension."""
    if isinstance(images, Iterable) and not isinstance(images, Tensor | list | tuple | Mapping):
        parts = list(images)
        if labels is None and parts:
            return [each[0] for each in parts], torch.cat([torch.as_tensor(each[1]) for each in parts])
    elif isinstance(images, list) and images and all(isinstance(image, Tensor) for image in images):
        alike = len({image.shape for image in images}) == 1
        parts = [torch.stack(images)] if alike else [image[None] for image in images]
    else:
        parts = [dict(images) if isinstance(images, Mapping) else images]
    if labels is None:
        raise DistapError("labels are missing: only an iterator of (images, labels) goes without")
    return parts, torch.as_tensor(labels)


def rows_of(part: Any) -> int:
    counts = {shape[0] if shape else 0 for shape in _shapes(part)}
    if len(counts) != 1:
        have = f"have {', '.join(map(str, sorted(counts)))} rows" if counts else "hold no tensor"
        raise DistapError(f"images {have}; every tensor needs one row for each image")
    return counts.pop()


def are_alike(parts: list[Any]) -> bool:
    """Tell whether images of different parts can be described together."""
    return len({tuple(shape[1:] for shape in _shapes(part)) for part in parts}) == 1


def _shapes(part: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]


def _joined(first: Any, *others: Any) -> Any:
    return torch.cat([first, *others]) if isinstance(first, Tensor) else first


def _picked(rows: Rows, tensor: Tensor) -> Tensor:
    return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]


def _blanked(blank: Tensor, tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy[blank.to(tensor.device)] = 0
    return copy
