"""Packing images into WebDataset tar shards."""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
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
    """Pack a folder with a sub-folder a class, or a CSV of path,label; the rest is as in `pack_images`.

    Raises:
        DistapError: the source holds no image, or as in `pack_images`.
    """
    _require_free(output)
    return pack_images(list_images(source), output, images_per_shard, track)


def pack_images(
    images: Sequence[ImageFile], output: Path, images_per_shard: int = 1000, track: Track = untracked
) -> tuple[Index, list[Skipped]]:
    """Pack images into shards with an index beside them.

    Args:
        images: in the order in which they are packed.
        output: folder of the shards; it must not exist, or be empty. It appears when everything is in it.
        images_per_shard: the last shard has fewer.
        track: wraps a loop to show its progress.
    Returns:
        The index, and the images that were left out since they are damaged.
    Raises:
        DistapError: no image is usable, a class is in two groups, or there is something at the output already.
    """
    _require_free(output)
    skipped: list[Skipped] = []
    sound = list(_sound(track(images, "checking images", len(images)), skipped))
    if not sound:
        raise DistapError(f"{output}: none of the {len(images)} images can be read; first: {skipped[:1]}")
    # Labels of a CSV are numbers already; the others are numbered in the order of their names.
    names = sorted({image.class_name for image in sound}, key=lambda name: (len(name) if name.isdigit() else 0, name))
    numbers = {name: number for number, name in enumerate(names)}
    aside = output.with_name(f".{output.name}.packing")
    shutil.rmtree(aside, ignore_errors=True)  # of a packing that was interrupted
    aside.mkdir(parents=True)
    starts = range(0, len(sound), images_per_shard)
    for shard, start in enumerate(track(starts, "packing shards", len(starts))):
        _write_shard(aside / f"{shard:06d}.tar", sound[start : start + images_per_shard], start, numbers)
    groups = _groups(sound)
    lines = [f"{name}\t{groups[name]}\n" if groups[name] else f"{name}\n" for name in names]
    (aside / NAMES_FILE).write_text("".join(lines), encoding="utf-8")
    index, undecodable = index_shards(aside, track)
    aside.replace(output)
    return index, skipped + undecodable


def _require_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DistapError(f"{output}: there is something already; choose another folder or remove it")


def _groups(images: Iterable[ImageFile]) -> dict[str, str]:
    """The group of each class."""
    groups: dict[str, str] = {}
    for image in images:
        known = groups.setdefault(image.class_name, image.group)
        if known != image.group:
            raise DistapError(
                f"{image.path}: class {image.class_name!r} is in group {image.group!r}, but in {known!r} before"
            )
    return groups


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
