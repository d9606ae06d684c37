"""From an encoded image to the pixels of the network's input, uint8."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchvision.transforms import v2

from distap.data.images.augmentation import Augmentation
from distap.data.images.decoding import Box


class Croppable(Protocol):
    """What a transform needs of an image, such as `EncodedImage`."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, pixels."""
        ...

    def crop(self, box: Box, size: int, scaled: bool) -> Tensor:
        """(3, size, size) uint8: a part of the image, scaled; `scaled` is a matter of decoding."""
        ...


Transform = Callable[[Croppable], Tensor]


def training_transform(size: int, augmentation: Augmentation, scaled: bool = True) -> "CropAndVary":
    """A random crop, scaled to (3, size, size) uint8, flipped and coloured at random.

    The crop is drawn for the image's size alone, before anything is decoded; `scaled` says whether JPEG may then be
    decoded at reduced scale.
    """
    choose = central_box if augmentation.crop == 1 else RandomBox(augmentation.crop)
    steps: list[v2.Transform] = []
    if augmentation.flip:
        steps.append(v2.RandomHorizontalFlip(augmentation.flip))
    if augmentation.colour:
        strength = augmentation.colour
        steps.append(v2.ColorJitter(strength, strength, strength, strength / 4))
    if augmentation.grey:
        steps.append(v2.RandomGrayscale(augmentation.grey))
    return CropAndVary(size, choose, v2.Compose(steps) if steps else None, scaled)


def evaluation_transform(size: int, scaled: bool = True) -> "CropAndVary":
    """The central square of the image, scaled to (3, size, size) uint8."""
    return CropAndVary(size, central_box, None, scaled)


@dataclass(frozen=True)
class CropAndVary:
    """Chooses a box of an image, decodes it at `size`, and varies the result."""

    size: int
    choose: Callable[[int, int], Box]
    vary: Callable[[Tensor], Tensor] | None
    scaled: bool

    def __call__(self, image: Croppable) -> Tensor:
        """(3, size, size) uint8."""
        pixels = image.crop(self.choose(*image.size), self.size, self.scaled)
        return self.vary(pixels) if self.vary else pixels


def central_box(width: int, height: int) -> Box:
    """The greatest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


class RandomBox:
    """A box as torchvision's RandomResizedCrop draws it, with torch's global random state.

    Args:
        area: smallest share of the image's area.
    """

    def __init__(self, area: float) -> None:
        self._crop = v2.RandomResizedCrop(1, scale=(area, 1.0))

    def __call__(self, width: int, height: int) -> Box:
        """A box of an image of this size."""
        drawn = self._crop.make_params([torch.empty(3, height, width, dtype=torch.uint8, device="meta")])
        left, top = drawn["left"], drawn["top"]
        return left, top, left + drawn["width"], top + drawn["height"]


def seeded(transform: Transform, image: Croppable, seed: int) -> Tensor:
    """The transformed image with the randomness of `seed`; torch's global random state is left alone."""
    generator = torch.default_generator  # torch.manual_seed would seed GPUs as well, and take longer than a crop
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        return transform(image)
    finally:
        generator.set_state(state)
