"""A batch of a caller's loop, and descriptors of a caller's network, for the three stages."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from distap.errors import DistapError, tensor_given
from distap.ranking.inputs import Inputs
from distap.stages.exactness import default_drift
from distap.stages.micro_batches import Rows, as_rows
from distap.world import World

Pool = Callable[[Tensor], Tensor]


class GivenBatch:
    """One rank's images, as several nested tensors `pieces`, each with some rows.

    A rank with fewer images than others repeats its last one, up to `share`, by its number and
    without a copy; `present` is False for these rows.

    Args:
        seed: the same on all ranks.
        is_alike: whether the images of all ranks have one size, so that one pass can describe
            several.
    """

    def __init__(
        self,
        pieces: list[Any],
        inputs: Inputs,
        *,
        share: int,
        world: World,
        step: int,
        seed: int,
        is_alike: bool,
    ) -> None:
        self.step = step
        self.total = share * world.size
        self.order: Tensor | None = None
        self.world = world
        self.seed = seed
        self.is_alike = is_alike
        self.extra = inputs.extra
        # Row k of rank r is slot k W + r, so every rank has as many rows as the fullest.
        self.labels, self.present, self.samples = inputs.padded(share)
        # The image of each row; rows beyond this rank's images have the last one.
        self._image_of_row = torch.arange(share).clamp(max=len(inputs.labels) - 1)
        self._pieces = pieces
        self._starts = torch.tensor([0, *accumulate(map(rows_of, pieces))])
        self._is_blank = torch.zeros(share, dtype=torch.bool)

    def images(self, rows: Rows) -> Any:
        # Rows may lie in several of the caller's pieces: pick from each, then join, where all are
        # alike.
        wanted = self._image_of_row[rows]
        of_piece = torch.searchsorted(self._starts, wanted, right=True) - 1
        picked = []
        for number in of_piece.unique().tolist():
            inside = as_rows(wanted[of_piece == number] - self._starts[number])
            picked.append(tree_map_only(Tensor, partial(_picked, inside), self._pieces[number]))
        images = picked[0] if len(picked) == 1 else tree_map(_joined, *picked)
        # The caller's tensors are not overwritten: an image is blanked in a copy, each time that it
        # is read.
        blank = self._is_blank[rows]
        return tree_map_only(Tensor, partial(_blanked, blank), images) if blank.any() else images

    def blank(self, rows: Tensor) -> None:
        self._is_blank[rows.cpu()] = True


@dataclass
class Outputs:
    """Descriptors in what a caller's network returns."""

    network: nn.Module
    world: World
    normalise: bool
    field: str | int | None  # of the output
    pool: Pool | None

    def __post_init__(self) -> None:
        # The autocast of the forward call, for replay too: it runs in `backward`, which the caller
        # may call outside `torch.autocast`.
        kind = self.world.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    @property
    def default_drift(self) -> float:
        """Return the default limit of the difference between an image's two descriptors."""
        _, _, is_autocast = self._autocast
        dtypes = {
            parameter.dtype
            for parameter in self.network.parameters()
            if parameter.is_floating_point()
        }
        is_exact = not is_autocast and dtypes <= {torch.float32, torch.float64}
        return default_drift(self.world.device, is_exact)

    def __call__(self, images: Any) -> Tensor:
        kind, dtype, is_enabled = self._autocast
        # Without a cache: one that was filled without a graph would lose the parameters' gradients.
        with torch.autocast(kind, dtype, is_enabled, cache_enabled=False):
            output = self.network(images)
        n = rows_of(images)
        if self.field is not None:
            output = _field_of(output, self.field, n)
        if self.pool is not None and isinstance(output, Tensor) and output.ndim in (3, 4):
            output = self.pool(output)
        if not (isinstance(output, Tensor) and output.ndim == 2 and len(output) == n):
            raise DistapError(
                "network.no_descriptors",
                f"the network returned {_named(output)} for {n} images; descriptors (n, C) are"
                " expected: name a field by `output`, and a `pooling` of tokens or maps",
            )
        if not output.is_floating_point():
            raise DistapError(
                "network.no_descriptors",
                f"the network returned numbers of {output.dtype}; descriptors are real numbers of a"
                " floating-point type (of complex ones, torch.view_as_real(output).flatten(1) has"
                " the same distances)",
            )
        # Ranking compares similarities that differ by little, which 16 bits would tie.
        descriptors = output.to(torch.promote_types(output.dtype, torch.float32))
        return normalize(descriptors) if self.normalise else descriptors


def cut_along_rows(
    images: Any, labels: Tensor | ArrayLike | None
) -> tuple[list[Any], Tensor | ArrayLike]:
    """Return images as nested tensors that can be cut along their first dimension, and labels."""
    images = tree_map_only(np.ndarray, lambda array: tensor_given(array, "images"), images)
    is_iterator = isinstance(images, Iterable) and not isinstance(
        images, Tensor | list | tuple | Mapping
    )
    if not is_iterator:
        pieces = _pieces_of(images)
    elif labels is not None:
        pieces = list(images)
    else:
        pairs = list(images)
        pieces = [pair[0] for pair in pairs]
        if pairs:
            labels = torch.cat([tensor_given(pair[1], "labels") for pair in pairs])
    if labels is None:
        raise DistapError(
            "data.no_labels",
            "labels are missing: only an iterator of (images, labels) goes without",
        )
    return pieces, labels


def _pieces_of(images: Any) -> list[Any]:
    if isinstance(images, list) and images and all(isinstance(image, Tensor) for image in images):
        if len({image.shape for image in images}) == 1:
            return [torch.stack(images)]
        return [image[None] for image in images]
    return [dict(images) if isinstance(images, Mapping) else images]


def rows_of(piece: Any) -> int:
    counts = {shape[0] if shape else 0 for shape in _shapes(piece)}
    if not counts:
        raise DistapError(
            "data.wrong_images",
            f"images are {_named(piece)}; expected tensors or arrays with a row for each image",
        )
    if len(counts) != 1:
        raise DistapError(
            "data.wrong_images",
            f"images have {', '.join(map(str, sorted(counts)))} rows; every tensor needs one row"
            " for each image",
        )
    return counts.pop()


def refuse_graphs(pieces: list[Any]) -> None:
    """Raise a DistapError if images have a graph, whose gradient the three stages would drop."""
    for leaf in tree_leaves(pieces) if torch.is_grad_enabled() else ():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            origin = ""
            if leaf.grad_fn is not None:
                origin = f" (made by {leaf.grad_fn.name().removesuffix('Backward0')})"
            raise DistapError(
                "data.images_with_graph",
                f"images {tuple(leaf.shape)} require a gradient{origin}, which they would not get:"
                " move what makes them into the network, or detach() them",
            )


def are_alike(pieces: list[Any]) -> bool:
    """Return whether all images have one shape, so that one pass can describe several."""
    return len({tuple(shape[1:] for shape in _shapes(piece)) for piece in pieces}) == 1


def _shapes(piece: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(piece) if isinstance(leaf, Tensor)]


def _joined(*pieces: Any) -> Any:
    return torch.cat(pieces) if isinstance(pieces[0], Tensor) else pieces[0]


def _picked(rows: Rows, tensor: Tensor) -> Tensor:
    return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]


def _blanked(blank: Tensor, tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy[blank.to(tensor.device)] = 0
    return copy


def _field_of(output: Any, field: Any, n: int) -> Any:
    """Return a field of a dict, tuple, dataclass or ModelOutput."""
    try:
        return (
            output[field]
            if isinstance(output, Mapping) or isinstance(field, int)
            else getattr(output, field)
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DistapError(
            "network.no_descriptors",
            f"the network returned {_named(output)} for {n} images, without {field!r}",
        ) from error


def _named(output: Any) -> str:
    """Name type and shape of images, or of what a network returns."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    kind = f"a {type(output).__name__}"
    if isinstance(output, Mapping):
        return f"{kind} with {', '.join(map(str, output))}"
    if isinstance(output, list | tuple) and len(output) > 3:
        return f"{kind} of {len(output)} {type(output[0]).__name__}"
    if isinstance(output, list | tuple):
        return f"{kind} of {', '.join(map(_named, output)) or 'nothing'}"
    return kind
