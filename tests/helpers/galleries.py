"""A small gallery that can be searched: a trained network, a data set and an index of it."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from images import write_images
from PIL import Image
from small_trainings import recipe

from benchmarks.photos import pack
from distap.data.loading.reader import open_images
from distap.data.sizing import Sizing
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import Describing, Extraction
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.indexing import build_index
from distap.retrieval.stored_index import write_index
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.training.prepared import prepare
from distap.world import World

CLASSES = {"<i>apple": 9, "bear & cub": 8, "car": 8, "dog": 8, "elk": 7}


@dataclass(frozen=True)
class Gallery:
    """Where its parts are."""

    run: Path
    images: Path  # a folder a class
    shards: Path
    descriptors: Path
    index: Path


def make_gallery(folder: Path, training_shards) -> Gallery:
    """A gallery of 40 images in a folder, as the commands would make it."""
    run = folder / "run"
    Trainer(
        prepare(
            recipe(run, training_shards, steps=1, sampling={"name": "random", "batch_size": 8}),
            World(),
        ),
        World(),
    ).train()
    images = write_images(folder / "images", CLASSES, size=48, seed=5)
    first = next(iter(CLASSES))
    (images / first / "0.png").rename(images / first / "кот 0.png")
    pack(images, folder / "shards", images_per_shard=16)
    describer = ImageDescriber(trained_network(run, World())[1], Sizing("crop", 32))
    extraction = Extraction(
        Describing(describer, World(), workers=0), open_images(folder / "shards")
    )
    extract_to_folder(extraction, folder / "descriptors")
    gallery = Gallery(run, images, folder / "shards", folder / "descriptors", folder / "index")
    index_to(gallery, gallery.index)
    return gallery


def index_to(gallery: Gallery, folder: Path, kind: str = "flat") -> Path:
    """Index a gallery's descriptors in another way."""
    described = read_descriptors(gallery.descriptors)
    write_index(folder, build_index(described, kind))
    return folder


def upload(seed: int, form: str = "PNG", size: tuple[int, int] = (48, 40)) -> bytes:
    """An image file that is not in the gallery."""
    generator = np.random.default_rng(seed)
    pixels = np.kron(
        generator.integers(0, 256, (size[1] // 8, size[0] // 8, 3)), np.ones((8, 8, 1))
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, form)
    return buffer.getvalue()
