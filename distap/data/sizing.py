"""How images are scaled and cropped, as text and as functions, and where pixels wait.

Recipes are read with it, so it imports no torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt

from distap.data.images.boxes import Box, Shape, central_square, clipped
from distap.data.images.damage import MAX_PIXELS, DamagedImageError
from distap.errors import DistapError

if TYPE_CHECKING:
    from torch import Tensor

    from distap.data.images.decoding import EncodedImage

NUMBER = "[0-9]{1,9}"
SIZINGS = re.compile(
    rf"(?:resize (?P<resize>{NUMBER}(?:x{NUMBER})?) (?=crop))?(?:(?P<kind>crop|side)"
    rf" (?P<pixels>{NUMBER})|original)"
)
EXPECTED = (
    "expected `crop N`, `side N` or `original`, N pixels, or `resize M crop N` or `resize HxW crop"
    " N` with M of N or more, and so H and W"
)


@dataclass(frozen=True)
class Sizing:
    """How to scale an image; `str` and `parse` convert it to text and back.

    `crop` takes the central square at `pixels` by `pixels`: the largest one, or with `resize` the
    one that is left of the image once its shorter side is scaled to `resize` pixels, or all of it
    to a height and width. `side` takes the whole image, scaled down so that its longer side is
    `pixels` at most; `original` the whole image as it is, and has no `pixels`.
    """

    kind: Literal["crop", "side", "original"]
    pixels: int | None = None
    resize: tuple[int, ...] = ()  # pixels of the shorter side, or height and width

    def __post_init__(self) -> None:
        if self.pixels == 0 or (self.resize and min(self.resize) < (self.pixels or 0)):
            raise DistapError("image.unknown_sizing", f"sizing `{self}`: {EXPECTED}")
        sides = self.resize or ((self.pixels or 0) * (self.kind == "crop"),)
        if sides[0] * sides[-1] > MAX_PIXELS:
            raise DistapError(
                "image.too_large", f"sizing `{self}`: more than {MAX_PIXELS:,} pixels an image"
            )

    def __str__(self) -> str:
        resize = f"resize {'x'.join(map(str, self.resize))} " if self.resize else ""
        return resize + (self.kind if self.pixels is None else f"{self.kind} {self.pixels}")

    @classmethod
    def parse(cls, text: str) -> "Sizing":
        match = SIZINGS.fullmatch(text)
        if match is None:
            raise DistapError("image.unknown_sizing", f"sizing {text!r}: {EXPECTED}")
        pixels = int(match["pixels"]) if match["pixels"] else None
        resize = tuple(map(int, match["resize"].split("x"))) if match["resize"] else ()
        return cls(match["kind"] or "original", pixels, resize)  # type: ignore[arg-type]

    def shape(self, width: int, height: int) -> Shape:
        """Return the height and width to scale an image, or a box of one, to."""
        if self.kind == "original":
            return height, width
        assert self.pixels is not None
        if self.kind == "crop":
            return self.pixels, self.pixels
        scale = min(self.pixels / max(width, height), 1.0)
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def __call__(self, image: "EncodedImage", box: Box | None = None) -> "Tensor":
        """Scale an image, or its part in a box, to (3, height, width) uint8.

        JPEG may be decoded at reduced scale, except with `resize`: its pixels are, bit for bit,
        those of torchvision's Resize(resize) and CenterCrop(pixels) on the image as a uint8 tensor.

        Raises:
            DamagedImageError: nothing of the image is in the box, or it is too narrow; see also
                `EncodedImage`.
        """
        # Imported here, since recipes are read without torch.
        from torchvision.transforms.v2 import functional as F

        width, height = image.size
        inside = clipped(box or (0, 0, width, height), width, height)
        if inside is None:
            raise DamagedImageError(
                "missing_field", f"nothing of its {width} x {height} pixels is in the box {box}"
            )
        left, top, right, bottom = inside
        width = right - left
        height = bottom - top
        if self.resize and self.pixels is not None:
            # With its shorter side scaled to r, an image has r * r * longer / shorter pixels: a
            # strip has too many.
            longer = max(width, height)
            shorter = min(width, height)
            if len(self.resize) == 1 and self.resize[0] ** 2 * longer > MAX_PIXELS * shorter:
                raise DamagedImageError(
                    "too_large", f"too narrow for `{self}`: {width} x {height} pixels"
                )
            resized = F.resize(image.crop(inside, (height, width)), [*self.resize], antialias=True)
            return F.center_crop(resized, [self.pixels]).contiguous()
        return image.crop(
            central_square(inside) if self.kind == "crop" else inside, self.shape(width, height)
        )


@dataclass(frozen=True)
class PixelSettings:
    """Choose where a rank keeps the pixels of its images between the describe and replay passes."""

    memory_bytes: NonNegativeInt = 8 * 2**30
    """Hold a rank's share of the global batch in memory if it has at most this many bytes, an image
    3 x data.image_size ** 2; otherwise in a temporary file, a spool, that is mapped into memory."""
    spool_folder: Path | None = None
    """Folder of the spool file; null takes the system's for temporary files. A folder that is
    itself in memory (tmpfs) saves no memory."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section
