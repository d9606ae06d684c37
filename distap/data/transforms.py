"""From a decoded image to the pixels of the network's input, uint8."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Augmentation:
    """What is varied in training.

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

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        for name in ("crop", "flip", "colour", "grey"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number from 0 to 1")
        if self.crop == 0:
            raise ValueError("crop is 0; expected a share of the image's area above 0")


def training_transform(size: int, augmentation: Augmentation) -> Transform:
    """A random crop, scaled to (3, size, size) uint8, flipped and coloured at random."""
    crop: list[v2.Transform] = (
        [v2.Resize(size, antialias=True), v2.CenterCrop(size)]
        if augmentation.crop == 1
        else [v2.RandomResizedCrop(size, scale=(augmentation.crop, 1.0), antialias=True)]
    )
    colour: list[v2.Transform] = []
    if augmentation.colour:
        strength = augmentation.colour
        colour = [v2.ColorJitter(strength, strength, strength, strength / 4)]
    steps = [v2.ToImage(), *crop, v2.RandomHorizontalFlip(augmentation.flip), *colour]
    return _composed([*steps, v2.RandomGrayscale(augmentation.grey)])


def evaluation_transform(size: int) -> Transform:
    """The whole image scaled so that its shorter side is `size`, and the centre (3, size, size) of it, uint8."""
    return _composed([v2.ToImage(), v2.Resize(size, antialias=True), v2.CenterCrop(size)])


def _composed(steps: list[v2.Transform]) -> Transform:
    transform: Transform = v2.Compose([*steps, v2.ToPureTensor()])
    return transform


def seeded(transform: Transform, image: Image.Image, seed: int) -> Tensor:
    """The transformed image with the randomness of `seed`; torch's global random state is left alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return transform(image)
