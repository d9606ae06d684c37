"""Photos of several shapes, and what describes them."""

import io
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from networks import random_network
from PIL import Image

from benchmarks.photos import photo
from distap.data.images.decoding import EncodedImage
from distap.data.loading.reader import open_images
from distap.data.sizing import Sizing
from distap.evaluation.extraction import extracting
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import Describing, Extraction
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.world import World

SHAPES = [(40, 32), (32, 40), (40, 40), (40, 32), (48, 33), (32, 40)]  # width and height
ORIENTATION = 0x0112


def describe_files(maker, images):
    return maker.describe_pixels((maker.sizing(EncodedImage(data)) for data in images), len(images))


def network(seed=0, backbone="resnet10t", projection=16):
    return random_network(backbone, projection, seed)


def describer(sizing="crop 32", seed=0, **settings):
    return ImageDescriber(network(seed), Sizing.parse(sizing), **settings)


def encoded(image, form="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_photos(folder: Path) -> Path:
    """30 photos of five shapes in two folders, one of them turned by EXIF."""
    for number in range(30):
        path = folder / f"{number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(photo(*SHAPES[number % len(SHAPES)], seed=number)))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    (folder / "turned.jpg").write_bytes(
        encoded(photo(40, 32, seed=99), "JPEG", quality=95, exif=exif)
    )
    return folder


def extract(source, output, world=World(), maker=None, workers=0, part_images=128):  # noqa: B008 - it is frozen
    describing = Describing(maker or describer("original"), world, workers)
    with patch.object(extracting, "FEWEST", part_images):
        return extract_to_folder(Extraction(describing, open_images(source)), output)


def one_by_one(maker, source: Path, keys) -> np.ndarray:
    return torch.cat([describe_files(maker, [(source / key).read_bytes()]) for key in keys]).numpy()
