"""Augmentation: from an encoded image to the uint8 pixels of the network's input, cropped and varied at random."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torchvision.transforms import v2

from distap.data.images.decoding import Box, Shape


class Croppable(Protocol):
    """An image that a transform can crop, such as `EncodedImage`."""

    size: tuple[int, int]  # width and height, pixels

    def crop(self, box: Box, shape: Shape, scaled: bool) -> Tensor:
        """(3, height, width) uint8: a part of the image, scaled; `scaled` allows decoding at reduced scale."""


Transform = Callable[[Croppable], Tensor]


@dataclass(frozen=True)
class CropFlipColour:
    """Crop, flip and colour images at random.

    Args:
        crop: smallest share of the image's area that a random crop keeps; 1 crops the centre only.
        flip: probability of a horizontal flip.
        colour: strength of the change of brightness, contrast and saturation; a quarter of it for hue.
        grey: probability of losing all colour.
    """

    crop: float = 0.5
    flip: float = 0.5
    colour: float = 0.0
    grey: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crop", "flip", "colour", "grey"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number from 0 to 1")
        if self.crop == 0:
            raise ValueError("crop is 0; expected a share of the image's area above 0")

    def transform(self, image_size: int, scaled_decoding: bool = True) -> "CropAndVary":
        """Draw a crop for the image's size, decode it (with `scaled_decoding` JPEG at reduced scale), and vary it."""
        crop = v2.RandomResizedCrop(1, scale=(self.crop, 1.0))
        choose = central_box if self.crop == 1 else partial(random_box, crop)
        steps: list[v2.Transform] = []
        if self.flip:
            steps.append(v2.RandomHorizontalFlip(self.flip))
        if self.colour:
            steps.append(v2.ColorJitter(self.colour, self.colour, self.colour, self.colour / 4))
        if self.grey:
            steps.append(v2.RandomGrayscale(self.grey))
        return CropAndVary(image_size, choose, v2.Compose(steps) if steps else None, scaled_decoding)


@dataclass(frozen=True)
class CropAndVary:
    """Choose a box of an image, decode it at `size`, and vary the result."""

    size: int
    choose: Callable[[int, int], Box]
    vary: Callable[[Tensor], Tensor] | None
    scaled: bool

    def __call__(self, image: Croppable) -> Tensor:
        pixels = image.crop(self.choose(*image.size), (self.size, self.size), self.scaled)
        return self.vary(pixels) if self.vary else pixels


def central_box(width: int, height: int) -> Box:
    """The largest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_box(crop: v2.RandomResizedCrop, width: int, height: int) -> Box:
    """A box of an image, drawn as torchvision's RandomResizedCrop does, with torch's global random state."""
    drawn = crop.make_params([torch.empty(3, height, width, dtype=torch.uint8, device="meta")])
    left, top = drawn["left"], drawn["top"]
    return left, top, left + drawn["width"], top + drawn["height"]


def seeded(transform: Transform, image: Croppable, seed: int) -> Tensor:
    """The image transformed with the randomness of `seed`; torch's global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed GPUs as well, and take longer than a crop.
        torch.default_generator.manual_seed(seed)
        return transform(image)
