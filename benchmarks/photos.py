"""Pictures with the statistics of photographs, made from a seed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distap.data.shards.packing import pack

DETAIL = 1 / 3  # amplitude grows with this power of the scale: a megapixel at quality 90 takes about 270 KB
COLOURS = np.array([[1.0, 1.0, 1.0], [0.28, 0.0, -0.28], [0.16, -0.32, 0.16]])  # grey varies most, as outdoors


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Smooth noise at every scale from one pixel to the whole picture."""
    generator = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    scale = 1
    while scale <= max(width, height):
        noise = generator.normal(size=(height // scale + 2, width // scale + 2, 3)) @ COLOURS
        layers = [Image.fromarray(layer.astype(np.float32)) for layer in np.moveaxis(noise, 2, 0)]
        smooth = [np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC)) for layer in layers]
        pixels += scale**DETAIL * np.stack(smooth, axis=2)
        scale *= 2
    return Image.fromarray((128 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def jpeg(picture: Image.Image, quality: int) -> bytes:
    """The picture as a JPEG with halved colour resolution, 4:2:0, as cameras write it."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def packed(folder: Path, files: Sequence[bytes], ending: str, images_a_class: int, **options: Any) -> Path:
    """Write the files as images of classes, pack them with the options of `pack`, and return the folder of shards."""
    for number, data in enumerate(files):
        path = folder / "images" / str(number // images_a_class) / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    pack(folder / "images", folder / "shards", **options)
    return folder / "shards"
