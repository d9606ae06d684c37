"""Vary the colours of an image at random, in one pass over its pixels.

Brightness, contrast, saturation and turning grey each blend the colours with something: with black,
with the mean grey of the image, or with the grey of the pixel. So all of them together are one map

    x -> scale x + grey g(x) + shift,        g(x) = 0.2989 red + 0.587 green + 0.114 blue

of the colours x of a pixel. Hue is none of this form.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchvision.transforms import v2

GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue
JITTERED = ("brightness", "contrast", "saturation", "hue")  # in the order of ColorJitter's numbers
CACHED_PIXELS = 2**15  # at once, so that their numbers stay in the processor's cache
Change = tuple[str, float]  # which of JITTERED, and its factor


@dataclass(frozen=True)
class VaryColours:
    """Vary brightness, contrast and saturation in random order, and turn some images grey.

    Factors, order and greys are drawn as torchvision's transforms draw them. The pixels differ from
    theirs: they are clamped and rounded once, at the end, where torchvision clamps and rounds down
    after each change.
    """

    jitter: "v2.ColorJitter | None"
    grey: float  # probability

    def __call__(self, pixels: Tensor) -> Tensor:
        """Vary the colours of (3, height, width) uint8."""
        changes = list[Change]()
        if self.jitter is not None:
            drawn = self.jitter.make_params([])
            names = [JITTERED[number] for number in drawn["fn_idx"].tolist()]
            changes += [(name, drawn[f"{name}_factor"]) for name in names if name != "hue"]
        if self.grey and torch.rand(1) < self.grey:
            changes.append(("saturation", 0.0))
        if not changes:
            return pixels
        mean = mean_grey(pixels) if "contrast" in dict(changes) else 0.0
        return mapped(pixels, *map_of(changes, mean))


def mean_grey(pixels: Tensor) -> float:
    """Return the mean of g(x) over an image, (3, height, width) uint8."""
    # The sum of a column fits into 32 bits, which numpy adds fastest.
    means = pixels.numpy().sum(1, dtype=np.uint32).mean(1) / pixels.shape[1]
    return float(means @ GREY)


def map_of(changes: Iterable[Change], mean: float) -> tuple[float, float, float]:
    """Return `scale`, `grey` and `shift` of changes that are made one after the other.

    `mean` is that of g(x) over the image before them.
    """
    scale = 1.0
    grey = 0.0
    shift = 0.0
    total = sum(GREY)  # 0.9999: torchvision's grey of a grey is a little darker
    for change, factor in changes:
        # g(scale x + grey g(x) + shift) = of_grey g(x) + of_shift
        of_grey = scale + total * grey
        of_shift = total * shift
        if change == "brightness":
            of_grey = of_shift = 0.0
        elif change == "contrast":
            of_shift += of_grey * mean
            of_grey = 0.0
        scale *= factor
        grey = factor * grey + (1 - factor) * of_grey
        shift = factor * shift + (1 - factor) * of_shift
    return scale, grey, shift


def mapped(pixels: Tensor, scale: float, grey: float, shift: float) -> Tensor:
    """Return scale x + grey g(x) + shift of each pixel x of (3, height, width) uint8, as uint8."""
    matrix = scale * torch.eye(3) + grey * torch.tensor(GREY)
    if scale == 0:
        matrix = matrix[:1]  # red, green and blue are one
    rounding = torch.tensor(shift + 0.5)
    colours = pixels.reshape(3, -1)
    result = torch.empty_like(colours)
    pieces = -(-colours.shape[1] // CACHED_PIXELS)
    for piece, place in zip(colours.chunk(pieces, 1), result.chunk(pieces, 1), strict=True):
        values = torch.addmm(rounding, matrix, piece.float()).clamp_(0, 255)
        # numpy makes bytes of them, rounding down, four times as fast as torch.
        place.numpy()[:] = values.numpy()
    return result.view(pixels.shape)
