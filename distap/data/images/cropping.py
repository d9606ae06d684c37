"""Crop an image as its file stores it, decode only what the crop needs, and turn the crop upright."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms.v2 import functional as F

FACTORS = (8, 4, 2, 1)  # by which libjpeg can scale down while it decodes

Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels
Shape = tuple[int, int]  # height and width, pixels
Turns = tuple[bool, bool, bool]  # whether EXIF mirrors the stored image left to right, top to bottom, transposes it


def reduction(box: Box, shape: Shape) -> int:
    """Return the greatest of FACTORS that leaves a box at least as large as `shape`, or 1."""
    height, width = shape
    across, down = box[2] - box[0], box[3] - box[1]
    return next((factor for factor in FACTORS if across >= factor * width and down >= factor * height), 1)


@dataclass
class StoredImage(ABC):
    """An encoded image; `crop` takes parts in the coordinates of the upright image.

    A part is first widened or narrowed, by less than a pixel of the result, to whole blocks of f x f pixels of the
    file, where f is its `reduction`: libjpeg can decode at 1/f, which makes one pixel of each block. An antialiased
    bilinear resize does the rest.
    """

    stored_size: tuple[int, int]  # width and height, pixels
    turns: Turns

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright image, pixels."""
        return self.stored_size[::-1] if self.turns[2] else self.stored_size

    def crop(self, box: Box, shape: Shape, scaled: bool = True) -> Tensor:
        """Crop and scale a part of the upright image to (3, height, width) uint8; `scaled` allows decoding at 1/f."""
        height, width = shape
        factor = reduction(box, shape)
        left, top, right, bottom = self._stored(box)
        part = (
            left // factor * factor,
            top // factor * factor,
            min(-(-right // factor), self.stored_size[0] // factor) * factor,
            min(-(-bottom // factor), self.stored_size[1] // factor) * factor,
        )
        across, down, transposed = self.turns
        decoded = self._decoded(part, factor if scaled else 1)
        pixels: Tensor = F.resize(decoded, [width, height] if transposed else [height, width], antialias=True)
        pixels = pixels.flip([axis for axis, mirrored in ((2, across), (1, down)) if mirrored])
        return (pixels.transpose(1, 2) if transposed else pixels).contiguous()

    @abstractmethod
    def _decoded(self, part: Box, factor: int) -> Tensor:
        """Decode a part of the stored image, at 1/factor of its size or in full, to (3, height, width) uint8."""

    def _stored(self, box: Box) -> Box:
        """Convert a box of the upright image to a box of the stored one."""
        across, down, transposed = self.turns
        width, height = self.stored_size
        left, top, right, bottom = (box[1], box[0], box[3], box[2]) if transposed else box
        if across:
            left, right = width - right, width - left
        if down:
            top, bottom = height - bottom, height - top
        return left, top, right, bottom
