"""List images that are not in shards yet: a folder with a sub-folder per class, or a CSV file."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distap.errors import DistapError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
# The first bytes of a file by the suffix of its format.
FIRST_BYTES: dict[str, bytes | tuple[bytes, ...]] = {
    "jpg": b"\xff\xd8",
    "png": b"\x89PNG",
    "webp": b"RIFF",
    "bmp": b"BM",
    "gif": b"GIF8",
    "tif": (b"II", b"MM"),
}
HEADINGS = (["path", "label"], ["path", "label", "group"], ["path", "class"], ["path", "class", "group"])


class ImageFile(NamedTuple):
    """An image to pack, its class, and the super-category of the class ("" for none)."""

    path: Path
    class_name: str
    group: str = ""


def suffix_of(data: bytes) -> str:
    """Return the usual suffix, without its dot, of a file with this content, "" if its format is unknown."""
    return next((suffix for suffix, start in FIRST_BYTES.items() if data.startswith(start)), "")


def list_images(source: Path) -> list[ImageFile]:
    """List the images of a folder with a sub-folder per class, or of a CSV file.

    A CSV has the columns path,label or path,class and optionally group, the super-category of the class. Paths are
    relative to the file. Labels are integers; for classes with other names the first line must be path,class. Without
    a heading the columns are path,label or path,label,group.
    """
    if source.is_dir():
        images, expected = list(_in_folders(source)), "one sub-folder a class, with images in it"
    elif source.is_file():
        images, expected = list(_in_csv(source)), "lines of path,label"
    else:
        raise DistapError(f"{source}: no such folder or CSV file")
    if not images:
        raise DistapError(f"{source}: the data set is empty; expected {expected}")
    return images


def _in_folders(source: Path) -> Iterator[ImageFile]:
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        for path in sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                yield ImageFile(path, folder.name)


def _in_csv(source: Path) -> Iterator[ImageFile]:
    heading: list[str] = []
    lines: dict[Path, int] = {}
    # Excel starts UTF-8 files with a byte-order mark.
    with source.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        try:
            for cells in ([cell.strip() for cell in row] for row in rows):
                where, is_first = f"{source}, line {rows.line_num}", not heading
                if is_first:
                    heading = cells if cells in HEADINGS else HEADINGS[len(cells) == 3]
                if not cells or (is_first and cells in HEADINGS):
                    continue
                image = _parse_row(where, heading, cells, source.parent)
                earlier = lines.setdefault(image.path, rows.line_num)
                if earlier != rows.line_num:
                    problem = "an image that is packed twice would be its own positive"
                    raise DistapError(f"{where}: {image.path} is on line {earlier} already; {problem}")
                yield image
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise DistapError(f"{source}, line {rows.line_num + 1}: not a CSV file in UTF-8: {error}") from error


def _parse_row(where: str, heading: list[str], cells: list[str], folder: Path) -> ImageFile:
    if len(cells) != len(heading):
        raise DistapError(f"{where}: {len(cells)} columns, expected {len(heading)}: {','.join(heading)}")
    name, group = cells[1], cells[2] if len(cells) == 3 else ""
    if heading[1] == "label":
        if not (name.isascii() and name.isdigit()):
            remedy = "a first line path,class allows any names"
            raise DistapError(f"{where}: label {name!r} is no integer of 0 or more; {remedy}")
        name = str(int(name))
    path = folder / cells[0]
    if not path.is_file():
        raise DistapError(f"{where}: no such image: {path}")
    return ImageFile(path, name, group)
