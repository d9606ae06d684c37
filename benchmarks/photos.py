"""Pictures with the statistics of photographs, made from a seed."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distap.data.shards.image_files import ImageFile, Listing, list_images
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index
from distap.data.shards.packing import pack_parts
from distap.errors import DistapError

# amplitude grows with this power of the scale: a megapixel at quality 90 takes about 270 KB
DETAIL = 1 / 3
# grey varies most, as outdoors
COLOURS = np.array([[1.0, 1.0, 1.0], [0.28, 0.0, -0.28], [0.16, -0.32, 0.16]])


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Smooth noise at every scale from one pixel to the whole picture."""
    generator = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    scale = 1
    while scale <= max(width, height):
        noise = generator.normal(size=(height // scale + 2, width // scale + 2, 3)) @ COLOURS
        layers = [Image.fromarray(layer.astype(np.float32)) for layer in np.moveaxis(noise, 2, 0)]
        smooth = [
            np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC)) for layer in layers
        ]
        pixels += scale**DETAIL * np.stack(smooth, axis=2)
        scale *= 2
    return Image.fromarray((128 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def jpeg(picture: Image.Image, quality: int) -> bytes:
    """The picture as a JPEG with halved colour resolution, 4:2:0, as cameras write it."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def packed(
    folder: Path, files: Sequence[bytes], ending: str, images_a_class: int, **options: Any
) -> Path:
    """Write the files as images of classes, pack them with the options of `pack`, and return the
    folder of shards.
    """
    for number, data in enumerate(files):
        path = folder / "images" / str(number // images_a_class) / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    pack(folder / "images", folder / "shards", **options)
    return folder / "shards"


def pack(
    images: Path | Listing | Sequence[ImageFile], output: Path, *arguments: Any, **layout: Any
) -> tuple[Index, list[Skipped]]:
    """Pack images into shards with an index next to them.

    Return the index and the files that were left out.

    `images` are in the order in which to pack them; or a folder or CSV, as in `list_images`. Their
    paths are kept within the folder, or within the lowest one that holds all of them. See
    `pack_parts` for the other arguments.
    """
    listing = list_images(images) if isinstance(images, Path) else images
    if not isinstance(listing, Listing):
        if not listing:
            raise DistapError("data.empty", f"{output}: there are no images to pack")
        listing = Listing(
            listing,
            (),
            Path(os.path.commonpath([image.path.absolute().parent for image in listing])),
        )
    listings = listing.by_part()
    if len(listings) > 1:
        raise DistapError(
            "data.several_parts",
            f"{output}: the list has several parts ({', '.join(listings)}); pack each by itself",
        )
    return pack_parts({"": listing}, output, *arguments, **{"order": "listed", **layout})[0]
