"""Units of a schedule, and the learning rate of each part of the network."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Unit = Literal["steps", "epochs"]  # an epoch is as many images as there are to train on


def as_written(number: float) -> Fraction:
    """Convert a float to the exact decimal number in the recipe: 0.1 is a tenth, not the nearest float."""
    return Fraction(str(number))


@dataclass(frozen=True)
class GroupSettings:
    """Learning rate and weight decay of one part of the network."""

    factor: float = 1.0
    """Factor on the learning rate of this part; 0 keeps the part unchanged."""
    weight_decay: float = 0.0
    """Weight decay of matrices and kernels; biases, scales and the pooling's power never decay."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic reads it when this is a section of a recipe
