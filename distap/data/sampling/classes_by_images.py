"""What the ways of sampling share that take P classes with K images."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClassesByImages:
    """P classes, K images of each.

    Args:
        classes: P.
        images: K, at least 2.
    """

    classes: int = 64
    images: int = 4

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.classes * self.images
