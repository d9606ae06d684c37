"""Data sets of any size: the rows of few real images again and again, in shards that are links to
one file.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.photos import pack
from distap.data.shards.index import Index, load_index

IMAGES_A_SHARD = 1000
SIDE = 32  # pixels
NAME_DIGITS = 12
# a step through all numbers of twelve digits, so that names compress as badly as real ones
SPREAD = 387_420_489
GROUPS = 12
SHARDS = "shards"  # folder of a data set


def write_repeated(folder: Path, images: int, classes: int) -> None:
    """Write a data set of N images, a multiple of 1,000, and K classes of equal size whose members
    lie apart.
    """
    pictures = folder / "pictures"
    generator = np.random.default_rng(0)
    for number in range(IMAGES_A_SHARD):
        path = pictures / "any" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)).save(path)
    pack(pictures, folder / SHARDS, images_per_shard=IMAGES_A_SHARD)
    index = load_index(folder / SHARDS)
    shards = images // IMAGES_A_SHARD
    for shard in range(1, shards):
        (folder / SHARDS / f"{shard:06}.tar").symlink_to("000000.tar")
    rows = np.arange(images)
    Index(
        shard=(rows // IMAGES_A_SHARD).astype(np.int32),
        offset=np.tile(index.offset, shards),
        size=np.tile(index.size, shards),
        crc32=np.tile(index.crc32, shards),
        label=rows % classes,
        width=np.tile(index.width, shards),
        height=np.tile(index.height, shards),
        key=_numbered(rows * SPREAD % 10**NAME_DIGITS),
        path=np.full(images, ""),
        shard_name=np.array([f"{shard:06}.tar" for shard in range(shards)]),
        shard_size=np.tile(index.shard_size, shards),
        shard_sha256=np.tile(index.shard_sha256, shards),
        class_name=_numbered(np.arange(classes)),
        class_levels=np.array([f"group {number}" for number in range(GROUPS)])[
            np.arange(classes) % GROUPS, None
        ],
    ).save(folder / SHARDS)


def _numbered(numbers: NDArray[np.int64]) -> NDArray[np.str_]:
    """Numbers as text of twelve digits; numpy's own way takes minutes for 100 million."""
    text = np.empty((len(numbers), NAME_DIGITS), dtype=np.uint32)
    for place in range(NAME_DIGITS):
        text[:, -1 - place] = ord("0") + numbers // 10**place % 10
    return text.view(f"<U{NAME_DIGITS}").ravel()
