"""Image files of few bytes that take much time or memory to decode."""

import io
import struct
from typing import Any

from PIL import Image

from distap.data.images.formats import readable_formats

# Mode, format and options of images of one colour: those that take the most memory a pixel, format
# by format.
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "PNG", {}),
    ("RGBA", "PNG", {}),
    ("LA", "PNG", {}),
    ("I;16", "PNG", {}),
    ("P", "PNG", {"transparency": 0}),
    ("1", "PNG", {}),
    ("P", "GIF", {"transparency": 0}),
    ("RGB", "WEBP", {"lossless": True, "method": 0}),
    ("RGBA", "WEBP", {"lossless": True, "method": 0}),
    ("RGB", "TIFF", {"compression": "tiff_deflate"}),
    ("RGBA", "TIFF", {"compression": "tiff_deflate"}),
    ("CMYK", "TIFF", {"compression": "tiff_deflate"}),
    ("LAB", "TIFF", {"compression": "tiff_deflate"}),
    ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
    ("CMYK", "JPEG", {"progressive": True, "subsampling": 0}),
    ("RGB", "JPEG2000", {}),
    ("RGBA", "JPEG2000", {}),
    ("RGB", "AVIF", {"speed": 10}),
    ("RGBA", "HEIF", {}),
]


# nineteen with all readers
KINDS = [f"{mode} {form}" for mode, form, _ in FORMS if form in readable_formats()]


def costly_image(kind: str, side: int) -> bytes:
    """A square of `side` pixels, of one of KINDS."""
    mode, form, options = next(element for element in FORMS if kind == f"{element[0]} {element[1]}")
    Image.new(mode, (side, side)).save(buffer := io.BytesIO(), form, **options)
    return buffer.getvalue()


def arithmetic_jpeg(width: int, height: int, scans: int) -> bytes:
    """Coded arithmetically, with scans of ten bytes, for each of which the decoder goes through a
    whole colour.
    """
    table = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64)
    frame = (
        b"\xff\xc9"
        + struct.pack(">HBHHB", 17, 8, height, width, 3)
        + b"\x01\x11\0\x02\x11\0\x03\x11\0"
    )
    colours = (
        b"\xff\xda" + struct.pack(">HBB", 8, 1, 1 + number % 3) + b"\0\0\x3f\0"
        for number in range(scans)
    )
    return b"\xff\xd8" + table + frame + b"".join(colours) + b"\xff\xd9"
