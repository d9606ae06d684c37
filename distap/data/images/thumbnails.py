"""Small JPEG files of images, for pages."""

import io

from PIL import Image


def thumbnail(image: Image.Image, longer_side: int, quality: int) -> bytes:
    """The image scaled down, its longer side at most that many pixels; the image itself is changed."""
    image.thumbnail((longer_side, longer_side))
    return as_jpeg(image, quality)


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    """The image as a JPEG file of that quality, from 1 to 95."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
