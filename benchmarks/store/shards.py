"""Fill a store with the same photos in shards by class, in random order, and in MDS shards."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.photos import jpeg, pack, photo
from benchmarks.store.options import StoreOptions
from distap.randomness import permutation
from distap.telemetry.terminal import track

PHOTOS = 128  # that are drawn; the images are these again and again
QUALITY = 85
CLASS_SIZE = 5  # images of a class, as in Stanford Online Products
BY_CLASS = "by_class"
MIXED = "mixed"
MDS = "mds"
INSTALL = (
    "pip install --no-deps --target FOLDER mosaicml-streaming brotli catalogue cramjam"
    " python-snappy xxhash zstd"
)


class Filled(NamedTuple):
    """A folder that a store serves, with the folders BY_CLASS, MIXED and, if possible, MDS."""

    folder: Path
    image_bytes: int  # of all images together
    shard_bytes: int  # of the shards BY_CLASS together
    shards: dict[str, list[str]]  # names by folder


def streaming_package(folder: Path | None) -> Any:
    """Import MosaicML's streaming, also from a folder of its own; None if it is not installed.

    The folder comes last on the path: packages next to distap count, whatever streaming asks for.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return import_module("streaming")
    except ImportError:
        return None


def fill(folder: Path, options: StoreOptions) -> Filled:
    """Draw photos and pack them in each way."""
    seeds = range(min(PHOTOS, options.store_images))
    side = options.store_side
    drawn = []
    for seed in track(seeds, "drawing photos", len(seeds)):
        drawn.append(jpeg(photo(side, side, seed), QUALITY))
    files = [drawn[number % len(drawn)] for number in range(options.store_images)]
    images = folder / "images"
    for number, data in enumerate(files):
        path = images / f"{number // CLASS_SIZE:06d}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    served = folder / "served"
    served.mkdir()
    for name, order in ((BY_CLASS, "classes"), (MIXED, "random")):
        pack(images, served / name, options.images_per_shard, order=order)
    streaming = streaming_package(options.streaming)
    if streaming is not None:
        _write_mds(streaming, served / MDS, files, options.images_per_shard)
    shards = {
        name: sorted(path.name for path in (served / name).glob("*.tar"))
        for name in (BY_CLASS, MIXED)
    }
    shard_bytes = sum((served / BY_CLASS / name).stat().st_size for name in shards[BY_CLASS])
    return Filled(served, sum(map(len, files)), shard_bytes, shards)


def _write_mds(streaming: Any, folder: Path, files: list[bytes], images_per_shard: int) -> None:
    """Write the images in a random order, for streaming shuffles within blocks of neighbours."""
    limit = images_per_shard * sum(map(len, files)) // len(files)
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=limit) as writer:
        for number in permutation(len(files), 0).tolist():
            writer.write({"jpg": files[number], "cls": number // CLASS_SIZE})
