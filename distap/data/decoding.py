"""From the bytes of an image to its pixels, with damage told apart."""

import io
import warnings
from typing import Literal

from PIL import Image, ImageOps

Reason = Literal["decode_error", "truncated", "crc_mismatch", "missing_field", "too_large"]
REASONS: tuple[Reason, ...] = ("decode_error", "truncated", "crc_mismatch", "missing_field", "too_large")
MAX_PIXELS = 100_000_000


class DamagedImageError(Exception):
    """An image that cannot be used, and why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height in pixels, read from the header without decoding.

    Raises:
        DamagedImageError: it is no image, or has more than `max_pixels`.
    """
    with _open(data, max_pixels) as image:
        return image.size


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image, upright and RGB.

    Raises:
        DamagedImageError: it cannot be decoded, or has more than `max_pixels`.
    """
    with _open(data, max_pixels) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # each of Pillow's decoders raises its own on damage
            reason: Reason = "truncated" if "truncated" in str(error) else "decode_error"
            raise DamagedImageError(reason, str(error)) from error


def _open(data: bytes, max_pixels: int) -> Image.Image:
    with warnings.catch_warnings():
        # Our own limit follows; Pillow's warnings about size and odd metadata are not the user's.
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
        except Exception as error:
            raise DamagedImageError("decode_error", str(error)) from error
    if image.width * image.height > max_pixels:
        raise DamagedImageError("too_large", f"{image.width} x {image.height} pixels, the limit is {max_pixels}")
    return image
