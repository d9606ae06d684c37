"""Packing images into WebDataset tar shards."""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import webdataset

from distap.data.decoding import DamagedImageError, image_size
from distap.data.index import Index
from distap.data.indexing import LABEL_FIELD, NAMES_FILE, Skipped, index_shards
from distap.data.progress import Track, untracked
from distap.data.sources import ImageFile, list_images
from distap.errors import DistapError


def pack(
    source: Path, output: Path, images_per_shard: int = 1000, track: Track = untracked
) -> tuple[Index, list[Skipped]]:
    """Pack images into shards with an index beside them.

    Args:
        source: a folder with a sub-folder a class, or a CSV of path,label.
        output: folder of the shards; it must not exist, or be empty. It appears when everything is in it.
        images_per_shard: the last shard has fewer.
        track: wraps a loop to show its progress.
    Returns:
        The index, and the images that were left out since they are damaged.
    Raises:
        DistapError: the source has no usable image, or there is something at the output already.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DistapError(f"{output}: there is something already; choose another folder or remove it")
    images = list_images(source)
    skipped: list[Skipped] = []
    sound = list(_sound(track(images, f"checking {source}", len(images)), skipped))
    if not sound:
        raise DistapError(f"{source}: none of its {len(images)} images can be read; first: {skipped[0]}")
    # Labels of a CSV are numbers already; the others are numbered in the order of their names.
    names = sorted({image.class_name for image in sound}, key=lambda name: (len(name) if name.isdigit() else 0, name))
    numbers = {name: number for number, name in enumerate(names)}
    aside = output.with_name(f".{output.name}.packing")
    shutil.rmtree(aside, ignore_errors=True)  # of a packing that was interrupted
    aside.mkdir(parents=True)
    starts = range(0, len(sound), images_per_shard)
    for shard, start in enumerate(track(starts, "packing shards", len(starts))):
        _write_shard(aside / f"{shard:06d}.tar", sound[start : start + images_per_shard], start, numbers)
    (aside / NAMES_FILE).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    index, undecodable = index_shards(aside, track)
    aside.replace(output)
    return index, skipped + undecodable


def _sound(images: Iterable[ImageFile], skipped: list[Skipped]) -> Iterator[ImageFile]:
    for image in images:
        try:
            image_size(image.path.read_bytes())
        except DamagedImageError as error:
            skipped.append(Skipped(str(image.path), str(error)))
        else:
            yield image


def _write_shard(path: Path, images: list[ImageFile], first: int, numbers: dict[str, int]) -> None:
    with path.open("wb") as file, webdataset.TarWriter(file, mtime=0, encoder=False) as writer:
        for number, image in enumerate(images, first):
            field = image.path.suffix.lower().removeprefix(".")
            writer.write(
                {
                    "__key__": f"{number:08d}-{re.sub(r'[^A-Za-z0-9_-]+', '_', image.path.stem)[:60]}",
                    field: image.path.read_bytes(),
                    LABEL_FIELD: str(numbers[image.class_name]).encode(),
                }
            )
