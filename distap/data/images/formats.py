"""The image formats that distap reads: suffixes, first bytes and readers.

There are no others: decoders such as that of EPS run programs.
"""

import re
import struct
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from PIL import AvifImagePlugin, features

EXTRA = "pip install 'distap[formats]'"
START_BYTES = 64  # of a file, which tell its format


class Format(NamedTuple):
    """An image format under Pillow's name."""

    name: str
    suffixes: tuple[str, ...]  # of files, the usual one first
    start: bytes  # pattern of the first bytes
    feature: str = ""  # of Pillow, which some builds lack
    package: str = ""  # of the extra `formats`, which teaches Pillow to read it


# AVIF and HEIF share a container, which names its brands: the main one and, up to the end of a box, compatible ones.
FORMATS = (
    Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), rb"\xff\xd8"),
    Format("PNG", (".png",), rb"\x89PNG"),
    Format("WEBP", (".webp",), rb"RIFF....WEBP", "webp"),
    Format("BMP", (".bmp",), rb"BM"),
    Format("GIF", (".gif",), rb"GIF8"),
    Format("TIFF", (".tif", ".tiff"), rb"II[*+]\0|MM\0[*+]"),
    Format(
        "JPEG2000", (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"), rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "jpg_2000"
    ),
    Format("AVIF", (".avif", ".avifs"), rb"....ftyp(?:avi[fs]|m[is](?:f|a)[f12]....(?:....){0,9}avi[fs])", "avif"),
    Format("HEIF", (".heic", ".heif", ".hif"), rb"....ftyp(?:he[iv][cxms]|mif[12]|msf1)", package="pillow_heif"),
    Format("JXL", (".jxl",), rb"\xff\x0a|\0\0\0\x0cJXL ", package="pillow_jxl"),
)
OF_SUFFIX = {suffix: each for each in FORMATS for suffix in each.suffixes}
IMAGE_SUFFIXES = frozenset(OF_SUFFIX)
_STARTS = [(re.compile(each.start, re.DOTALL), each) for each in FORMATS]


def format_of(data: bytes) -> Format | None:
    """Return the format of a file from its first bytes; None if it is none of FORMATS."""
    return next((each for start, each in _STARTS if start.match(data)), None)


def suffix_of(data: bytes) -> str:
    """Return the usual suffix for a file's content, without the dot; "" if its format is unknown."""
    found = format_of(data)
    return found.suffixes[0].removeprefix(".") if found else ""


@cache
def missing_reader(name: str) -> str:
    """Register the reader of a format with Pillow; return "", or say which package is missing."""
    wanted = next(each for each in FORMATS if each.name == name)
    if wanted.feature and not features.check(wanted.feature):
        return f"this Pillow was built without {wanted.feature}: install one of pip's"
    if not wanted.package:
        return ""
    if find_spec(wanted.package) is None:
        return EXTRA
    module = import_module(wanted.package)
    if wanted.package == "pillow_heif":
        module.register_heif_opener(thumbnails=False, decode_threads=1)
    else:
        module.JpegXLImagePlugin.DECODE_THREADS = 0
    return ""


@cache
def readable_formats() -> tuple[str, ...]:
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # as of the others: loading has processes of its own
    return tuple(each.name for each in FORMATS if not missing_reader(each.name))


def jxl_size(data: bytes) -> tuple[int, int]:
    """Read width and height from a JPEG XL header, because its reader would decode the whole image first.

    Raises struct.error or ValueError if its header is damaged.
    """
    at = 0
    while not data.startswith(b"\xff\x0a", at):  # boxes, one of which holds the beginning of the image
        length, kind = struct.unpack_from(">I4s", data, at)
        head = 16 if length == 1 else 8
        if kind in (b"jxlc", b"jxlp"):
            at += head + (4 if kind == b"jxlp" else 0)
            continue
        length = struct.unpack_from(">Q", data, at + 8)[0] if length == 1 else length
        if length < head:
            raise ValueError("a JPEG XL file without an image")
        at += length
    bits = int.from_bytes(data[at + 2 : at + 14].ljust(12, b"\0"), "little")

    def take(count: int) -> int:
        nonlocal bits
        value = bits & ((1 << count) - 1)
        bits >>= count
        return value

    small = take(1)

    def side() -> int:
        return 8 * (1 + take(5)) if small else 1 + take((9, 13, 18, 30)[take(2)])

    height = side()
    ratio = ((0, 1), (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))[take(3)]
    return (height * ratio[0] // ratio[1] if ratio[0] else side()), height
