"""Decode images, JPEG at reduced scale if a crop allows it, and distinguish kinds of damage.

Pixels are 8-bit RGB and upright, whatever the file: EXIF's orientation is applied (broken EXIF is
ignored), 16 bits are divided by 257, transparency is shown on white, CMYK is converted by the naive
formula, colour profiles are ignored, and an animation gives its first frame.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from distap.data.images.boxes import Box, Shape, reduction
from distap.data.images.damage import MAX_PIXELS, DamagedImageError, NoReaderError
from distap.data.images.formats import LINE_ENDS, format_of, missing_reader, readable_formats
from distap.errors import DistapError

if TYPE_CHECKING:
    from torch import Tensor

# whether EXIF mirrors the stored image left to right, top to bottom, transposes it
Turns = tuple[bool, bool, bool]
Pixels = NDArray[np.uint8]  # (height, width, 3)

MAX_SIDE = 65_535  # pixels; JPEG's own limit: images beyond it are made to harm
# Scans of a JPEG, with those of images in it, and their pixels in all as a multiple of the largest
# image's. Files in use have up to some twenty scans; a few bytes of a scan can make the decoder go
# through the whole image.
MAX_SCANS = 100
MAX_SCANNED = 16
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
LARGEST_PROFILE = 2**20  # bytes of a colour profile; those in use have some kB
ORIENTATION = 0x0112  # EXIF's tag
# TIFF's tags
TILE_WIDTH = 322
TILE_LENGTH = 323
SMALL = 1_000_000  # pixels of an image whose scans cost nothing, whatever the limit
START_OF_SCAN = 0xDAFF  # JPEG's marker, as a number of two bytes, the lower one first
END_OF_JPEG = b"\xff\xd9"
# by the beginning of a file
END_MARKS = {b"\xff\xd8": END_OF_JPEG, b"\x89PNG": b"IEND\xaeB`\x82", b"GIF8": b";"}


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Read the stored width and height of an image, pixels, from its header.

    Raises the errors of `EncodedImage`.
    """
    with _damage_raised(data):
        return _open(data.lstrip(LINE_ENDS), max_pixels).size


def image_file(image: Any) -> bytes:
    """Return the bytes of an image's file; pixels become a PNG, which is lossless.

    `image` is a PIL image, a path, the bytes of a file, or uint8 pixels: an array (height, width,
    3), a tensor (3, height, width). Raise a DistapError for anything else.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DistapError(
                "image.unreadable", f"{image}: cannot be read: {error.strerror or error}"
            ) from error
    if hasattr(image, "permute"):  # a tensor
        image = image.cpu().permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DistapError(
                "image.wrong_pixels",
                f"an image of {image.shape} {image.dtype}; expected three colours of uint8: give"
                " images without a transform, since distap has its own",
            )
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise DistapError(
            "image.unknown_type",
            f"{type(image).__name__} is no image; expected a PIL image, a path, bytes, an array or"
            " a tensor",
        )
    return _opened_file(image) or _png(image)


def _opened_file(image: Image.Image) -> bytes | None:
    """Return the file of an image that is opened but not decoded; None for another.

    A PNG of its pixels would be larger, and a JPEG can be decoded at reduced scale.
    """
    file = getattr(image, "fp", None)
    # Pillow empties `tile` when it decodes.
    is_decoded = not getattr(image, "tile", None)
    if file is None or is_decoded or image.format not in readable_formats():
        return None
    place = file.tell()
    file.seek(0)
    data: bytes = file.read()
    file.seek(place)
    return data


def _png(image: Image.Image) -> bytes:
    upright = ImageOps.exif_transpose(image)
    if upright.mode not in PNG_MODES:
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


class EncodedImage:
    """An image file in memory, decoded as far as a crop needs.

    `size` is its upright width and height in pixels. All methods raise DamagedImageError if the
    file is no image of `readable_formats`, has more pixels than `max_pixels`, or cannot be decoded,
    and MemoryError, with its `name`, if memory does not suffice.
    """

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS, name: str = "an image") -> None:
        self._data = data.lstrip(LINE_ENDS)
        self._max_pixels = max_pixels
        with _damage_raised(data):
            self._image = _open(self._data, max_pixels)
        width, height = self._image.size
        self._raising = partial(
            _damage_raised, data, f"{name}: decoding its {width} x {height} pixels"
        )
        with self._raising():
            self._is_jpeg = self._image.format in ("JPEG", "MPO")
            if not self._is_jpeg:
                self._image.load()  # EXIF may stand after the pixels
                _refuse_large(*self._image.size, max_pixels)  # HEIF may have another size now
            self._turns = _turns(self._image)
            self.size = self._image.size[::-1] if self._turns[2] else self._image.size

    def whole(self) -> Image.Image:
        """Decode the whole image, upright and RGB."""
        return self.scaled(self.size[::-1])

    @property
    def profile(self) -> bytes | None:
        """Return the file's colour profile; None if it has none that fits pixels in RGB."""
        profile: bytes = self._image.info.get("icc_profile") or b""
        fits = profile[16:20] == b"RGB " and len(profile) <= LARGEST_PROFILE
        return profile if fits else None

    def scaled(self, shape: Shape, box: Box | None = None) -> Image.Image:
        """Scale the upright image, or its part in a box, by Pillow.

        This nearly gives the pixels of `crop`, and loads no torch.
        """
        part = Image.fromarray(self._decoded(box or (0, 0, *self.size), shape))
        return part.resize(shape[::-1], Image.Resampling.BILINEAR)

    def crop(self, box: Box, shape: Shape) -> "Tensor":
        """Crop and scale a part of the upright image to (3, height, width) uint8.

        The part is first widened or narrowed, by less than a pixel of the result, to whole blocks
        of f x f pixels of the file, where f is its `reduction`: libjpeg can decode at 1/f, which
        makes one pixel of each block. An antialiased bilinear resize does the rest.
        """
        import torch
        from torchvision.transforms.v2 import functional as F

        decoded = torch.from_numpy(self._decoded(box, shape)).permute(2, 0, 1)
        return F.resize(decoded, [*shape], antialias=True).contiguous()

    def _decoded(self, box: Box, shape: Shape) -> Pixels:
        """Decode a part of the upright image, at 1/f of its size or in full.

        Returns (height, width, 3) uint8.
        """
        factor = reduction(box, shape)
        across, down, transposed = self._turns
        # Only JPEG is decoded at reduced scale; the blocks of others are cut out of full pixels.
        scale = factor if self._is_jpeg else 1
        pixels = self._stored(factor)
        # At 1/f, each decoded pixel stands for a block of f x f pixels of the file:
        #
        #     f = 4    | 0 1 2 3 | 4 5 6 7 | 8 9          the third block is not whole, and dropped
        #     box          2 ... 7                        becomes 0 ... 8, that is pixels 0 and 1
        #
        # Blocks that are not whole lie at the end of the stored image, which may be the upright
        # one's beginning.
        rows, columns = (side // factor * factor // scale for side in self._image.size[::-1])
        pixels = pixels[:rows, :columns][:: -1 if down else 1, :: -1 if across else 1]
        upright = pixels.swapaxes(0, 1) if transposed else pixels
        left, top = (edge // factor * factor // scale for edge in box[:2])
        right, bottom = (-(-edge // factor) * factor // scale for edge in box[2:])
        # In one piece, since a resize would else take twice the time.
        return np.ascontiguousarray(upright[top:bottom, left:right])

    def _stored(self, factor: int) -> Pixels:
        """Decode the image as it is stored, a JPEG at 1/factor of its size."""
        with self._raising():
            if not self._is_jpeg:
                return np.array(_rgb(self._image))
            pixels = _by_libjpeg(self._data, self._image, factor)
            if pixels is None:
                image = _open(self._data, self._max_pixels)
                image.draft(None, (image.width // factor, image.height // factor))
                pixels = np.array(_rgb(image))
            return pixels


def _by_libjpeg(data: bytes, image: Image.Image, factor: int) -> Pixels | None:
    """Decode a JPEG at 1/factor of its size faster than Pillow, to the same (height, width, 3).

    Returns None for a file that only Pillow decodes, or whose error Pillow may pass over or
    explain.
    """
    if image.mode not in ("L", "RGB"):
        return None
    width, height = (-(-side // factor) for side in image.size)
    # A file may lack no more than its end marker: then nothing of the image is missing once it has
    # one.
    for file in (data, data.rstrip(END_OF_JPEG[:1]) + END_OF_JPEG):
        with suppress(ValueError):
            pixels: Pixels = simplejpeg.decode_jpeg(file, "RGB", min_height=height, min_width=width)
            return pixels if pixels.shape == (height, width, 3) else None
    return None


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """Open an image without decoding it, and refuse one whose decoding would do harm."""
    if not data:
        raise DamagedImageError("truncated", "the file is empty")
    file_format = format_of(data)
    if file_format and missing_reader(file_format):
        raise NoReaderError(
            "decode_error",
            f"{file_format.name}, for which there is no reader: {missing_reader(file_format)}",
        )
    # Pillow allocates the canvas of an extended WebP before it knows the size.
    if data[:4] == b"RIFF" and data[12:16] == b"VP8X":
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        _refuse_large(width, height, max_pixels)
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's own limit must not be lower than ours
    image = Image.open(io.BytesIO(data), formats=readable_formats())
    _refuse_large(*image.size, max_pixels)
    if image.format in ("JPEG", "MPO"):
        _refuse_scans(data, *image.size, max_pixels)
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # a small image may be one huge tile
        width, height = (int(image.tag_v2.get(tag, 1)) for tag in (TILE_WIDTH, TILE_LENGTH))
        _refuse_large(width, height, max_pixels)
    return image


def _refuse_scans(data: bytes, width: int, height: int, max_pixels: int) -> None:
    """Refuse a JPEG of more scans than files in use have."""
    # Two-byte numbers from even and from odd places: bytes.count would take a tenth of decoding a
    # large file to find the markers.
    numbers = (np.frombuffer(data, "<u2", (len(data) - start) // 2, start) for start in (0, 1))
    scans = sum(np.count_nonzero(words == START_OF_SCAN) for words in numbers)
    most_pixels = MAX_SCANNED * max(max_pixels, SMALL)
    if scans > MAX_SCANS or scans * width * height > most_pixels:
        raise DamagedImageError("too_large", f"{scans} scans of {width} x {height} pixels")


def _refuse_large(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise DamagedImageError(
            "too_large",
            f"{width} x {height} pixels, the limit is {max_pixels}, and {MAX_SIDE} a side",
        )


def _turns(image: Image.Image) -> Turns:
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # Pillow raises anything on broken EXIF; the image itself is sound
        orientation = 1
    return orientation in (2, 3, 7, 8), orientation in (3, 4, 6, 7), orientation in (5, 6, 7, 8)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint32)
        # 65,535 is 255 times 257, so this rounds to the nearest of 256 values, and white stays
        # white.
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise DamagedImageError(
            "decode_error", "32 bits a value, and no value is known to be white"
        )
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


@contextmanager
def _damage_raised(data: bytes, work: str = "") -> Iterator[None]:
    """Raise a DamagedImageError for errors of decoding, and hide warnings.

    If `work` describes decoding of an allowed size, a MemoryError stays one, and names it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except DamagedImageError:
            raise
        except Image.DecompressionBombError as error:
            raise DamagedImageError("too_large", str(error)) from error
        except Exception as error:  # each decoder of Pillow raises its own
            if work and isinstance(error, MemoryError):
                raise MemoryError(f"{work} ran out of memory") from error
            is_cut = "truncated" in str(error).lower() or seems_cut(data)
            detail = str(error) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                detail = f"not an image of {', '.join(readable_formats())}"
            raise DamagedImageError("truncated" if is_cut else "decode_error", detail) from error


def seems_cut(data: bytes) -> bool:
    """Return whether an image has no end marker near the end of the file.

    A film that is appended to an image looks the same.
    """
    if data[:4] == b"RIFF":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return any(
        data.startswith(start) and mark not in data[-64:] for start, mark in END_MARKS.items()
    )
