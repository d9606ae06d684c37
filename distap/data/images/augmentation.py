"""What is varied in training. Apart from what does it, so that a recipe is read without torchvision."""

from dataclasses import dataclass


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
