"""Images that are not in shards yet: a folder a class, or a CSV of path,label."""

import csv
from dataclasses import dataclass
from pathlib import Path

from distap.errors import DistapError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


@dataclass(frozen=True)
class ImageFile:
    """An image to pack, the name of its class, and that of the super-category its class belongs to ("": none)."""

    path: Path
    class_name: str
    group: str = ""


def list_images(source: Path) -> list[ImageFile]:
    """The images of a folder with a sub-folder a class, or of a CSV file.

    Raises:
        DistapError: nothing is there, it holds no image, or a line of the CSV is wrong.
    """
    if source.is_dir():
        images = _in_folders(source)
    elif source.is_file():
        images = _in_csv(source)
    else:
        raise DistapError(f"{source}: no such folder or CSV file")
    if not images:
        expected = "one sub-folder a class, with images in it" if source.is_dir() else "lines of path,label"
        raise DistapError(f"{source}: the data set is empty; expected {expected}")
    return images


def _in_folders(source: Path) -> list[ImageFile]:
    return [
        ImageFile(path, folder.name)
        for folder in sorted(source.iterdir())
        if folder.is_dir()
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _in_csv(source: Path) -> list[ImageFile]:
    """Paths are relative to the CSV file; labels are integers; a first line `path,label` is a heading."""
    images = []
    with source.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or (number == 1 and [cell.strip() for cell in row] == ["path", "label"]):
                continue
            where = f"{source}, line {number}"
            if len(row) != 2:
                raise DistapError(f"{where}: {len(row)} columns, expected two: path,label")
            path, label = source.parent / row[0].strip(), row[1].strip()
            if not (label.isascii() and label.isdigit()):
                raise DistapError(
                    f"{where}: label {label!r} is no integer of 0 or more; classes with names are packed from folders"
                )
            if not path.is_file():
                raise DistapError(f"{where}: no such image: {path}")
            images.append(ImageFile(path, str(int(label))))
    return images
