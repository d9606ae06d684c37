"""The image formats that distap reads: suffixes, first bytes, and readers.

Other formats are refused, because decoders such as that of EPS run programs.
"""

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from PIL import AvifImagePlugin, PngImagePlugin, features

EXTRA = "pip install 'distap[formats]'"
START_BYTES = 64  # of a file, which tell its format
# bytes of a PNG's comment or colour profile, unpacked; Pillow itself reads 2**20
LARGEST_COMMENT = 2**23
LINE_ENDS = b"\r\n"  # at the start of a file, which viewers pass over


class Format(NamedTuple):
    """An image format under Pillow's name."""

    name: str
    suffixes: tuple[str, ...]  # of files, the usual one first
    start: bytes  # pattern of the first bytes
    feature: str = ""  # of Pillow, which some builds lack
    package: str = ""  # of the extra `formats`, which teaches Pillow to read it


# AVIF and HEIF share a container, which names its brands: the main one and, up to the end of a box,
# compatible ones.
FORMATS = (
    Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), rb"\xff\xd8"),
    Format("PNG", (".png",), rb"\x89PNG"),
    Format("WEBP", (".webp",), rb"RIFF....WEBP", "webp"),
    Format("BMP", (".bmp",), rb"BM"),
    Format("GIF", (".gif",), rb"GIF8"),
    Format("TIFF", (".tif", ".tiff"), rb"II[*+]\0|MM\0[*+]"),
    Format(
        "JPEG2000",
        (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
        rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
        "jpg_2000",
    ),
    Format(
        "AVIF",
        (".avif", ".avifs"),
        rb"....ftyp(?:avi[fs]|m[is](?:f|a)[f12]....(?:....){0,9}avi[fs])",
        "avif",
    ),
    Format(
        "HEIF",
        (".heic", ".heif", ".hif"),
        rb"....ftyp(?:he[iv][cxms]|mif[12]|msf1)",
        package="pillow_heif",
    ),
)
FORMAT_BY_SUFFIX = {suffix: form for form in FORMATS for suffix in form.suffixes}


def format_of(data: bytes) -> Format | None:
    """Return the format of a file from its first bytes; None if it is none of FORMATS."""
    start = data.lstrip(LINE_ENDS)
    return next((form for form in FORMATS if re.match(form.start, start, re.DOTALL)), None)


@cache
def missing_reader(form: Format) -> str:
    """Register the reader of a format with Pillow; return "", or say which package is missing."""
    if form.feature and not features.check(form.feature):
        return f"this Pillow was built without {form.feature}: install one of pip's"
    if not form.package:
        return ""
    if find_spec(form.package) is None:
        return EXTRA
    import_module(form.package).register_heif_opener(thumbnails=False, decode_threads=1)
    return ""


@cache
def readable_formats() -> tuple[str, ...]:
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # as of the others: loading has processes of its own
    PngImagePlugin.MAX_TEXT_CHUNK = LARGEST_COMMENT
    return tuple(form.name for form in FORMATS if not missing_reader(form))
