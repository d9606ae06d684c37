"""Small images in folders and shards, readers of them, and damage to them."""

from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.photos import pack
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob
from distap.data.sampling import RandomSampling
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.world import World

ALONE = World()
AUGMENTATION = CropFlipColour(crop=0.3, flip=0.5, colour=0.4, grey=0.3)


def write_images(folder: Path, classes: dict[str, int], size: int = 24, seed: int = 0) -> Path:
    """A folder a class of PNG images; the images of a class are one pattern with different
    noise."""
    generator = np.random.default_rng(seed)
    for name, count in classes.items():
        pattern = generator.integers(0, 256, (4, 4, 3))
        for number in range(count):
            pixels = np.kron(pattern, np.ones((size // 4, size // 4, 1))) + generator.normal(
                0, 40, (size, size, 3)
            )
            path = folder / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return folder


def pack_sets(folder, shards, sets, size):
    """Images and shards of data sets, whose classes have the same names.

    `sets` has the numbers of classes and of the images of each, by the name of the set; `shards`
    names the folder of a set's shards.
    """
    for name, (count, images) in sets.items():
        classes = {f"class-{number:02}": images for number in range(count)}
        write_images(folder / name, classes, size, seed=count)
        pack(folder / name, folder / shards(name), images_per_shard=9)


def pack_eight_shards(folder):
    """16 classes of three images, a class in one shard; the images are in `images` beside them."""
    write_images(folder / "images", {f"class-{number:02}": 3 for number in range(16)})
    pack(folder / "images", folder / "shards", images_per_shard=6)
    return folder / "shards"


def indexed_images(source, batch_size=6, seed=0, size=16, world=ALONE, **settings):
    """Images of random batches."""
    sampling = RandomSampling(batch_size=batch_size)
    transform = AUGMENTATION.transform(size)
    settings = {"chunk": 2, "sizes": ((0, size, transform),), **settings}
    job = LoadingJob(parse_source(source), sampling, seed, **settings)
    return IndexedSource().open(job, world, Stopwatch())


def started(folder, workers=2, steps=20, **settings):
    """Shares of six images that loader workers read, and the first of them with its images."""
    shares = indexed_images(folder, workers=workers, **settings).shares(range(steps))
    share = next(shares)
    share.images(slice(0, 6))
    return shares, share


def damage(folder, samples):
    """Overwrite the first bytes of some images within their shards."""
    index = load_index(folder)
    for sample in samples:
        with (folder / index.shard_name[index.shard[sample]]).open("r+b") as file:
            file.seek(int(index.offset[sample]))
            file.write(b"damage")
