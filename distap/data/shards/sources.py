"""Images that are not in shards yet: a folder a class, or a CSV file."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distap.errors import DistapError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
HEADINGS = (["path", "label"], ["path", "label", "group"], ["path", "class"], ["path", "class", "group"])


@dataclass(frozen=True)
class ImageFile:
    """An image to pack, the name of its class, and that of the super-category its class belongs to ("": none)."""

    path: Path
    class_name: str
    group: str = ""


def list_images(source: Path) -> list[ImageFile]:
    """The images of a folder with a sub-folder a class, or of a CSV file.

    A CSV has the columns path,label or path,class, and may have a third, group: the super-category of the class.
    Paths are relative to the file. Labels are integers; classes are any names, so the heading path,class must
    say so; any other heading may be left out.

    Raises:
        DistapError: nothing is there, it holds no image, or a line of the CSV is wrong.
    """
    if source.is_dir():
        images = list(_in_folders(source))
    elif source.is_file():
        images = list(_in_csv(source))
    else:
        raise DistapError(f"{source}: no such folder or CSV file")
    if not images:
        expected = "one sub-folder a class, with images in it" if source.is_dir() else "lines of path,label"
        raise DistapError(f"{source}: the data set is empty; expected {expected}")
    return images


def _in_folders(source: Path) -> Iterator[ImageFile]:
    for folder in sorted(source.iterdir()):
        if folder.is_dir():
            files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
            for path in sorted(files):
                if path.suffix.lower() in IMAGE_SUFFIXES:
                    yield ImageFile(path, folder.name)


def _in_csv(source: Path) -> Iterator[ImageFile]:
    heading = HEADINGS[0]
    lines: dict[Path, int] = {}
    # Excel starts its UTF-8 with a byte-order mark.
    with source.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        try:
            for number, row in enumerate(rows, 1):
                cells = [cell.strip() for cell in row]
                if number == 1 and cells in HEADINGS:
                    heading = cells
                elif cells:
                    if number == 1 and len(cells) == 3:
                        heading = HEADINGS[1]
                    image = _line(f"{source}, line {rows.line_num}", heading, cells, source.parent)
                    if image.path in lines:
                        raise DistapError(
                            f"{source}, line {rows.line_num}: {image.path} is on line {lines[image.path]} already; "
                            "an image that is packed twice would be its own positive"
                        )
                    lines[image.path] = rows.line_num
                    yield image
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise DistapError(f"{source}, line {rows.line_num + 1}: not a CSV file in UTF-8: {error}") from error


def _line(where: str, heading: list[str], cells: list[str], folder: Path) -> ImageFile:
    if len(cells) != len(heading):
        raise DistapError(f"{where}: {len(cells)} columns, expected {len(heading)}: {','.join(heading)}")
    path, name, group = folder / cells[0], cells[1], cells[2] if len(cells) == 3 else ""
    if heading[1] == "label":
        if not (name.isascii() and name.isdigit()):
            raise DistapError(
                f"{where}: label {name!r} is no integer of 0 or more; a first line path,class allows any names"
            )
        name = str(int(name))
    if not path.is_file():
        raise DistapError(f"{where}: no such image: {path}")
    return ImageFile(path, name, group)
