"""List images that are not in shards yet: a folder with a sub-folder per class, or a CSV file."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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
    path: Path
    class_name: str
    group: str = ""  # super-category of the class, "" for none


class Entry(NamedTuple):
    """An image to pack, with what tells of a later change."""

    image: ImageFile
    size: int  # bytes
    modified: int  # nanoseconds since 1970

    def read(self) -> bytes:
        path = self.image.path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(data) != self.size:
            raise DistapError(f"{path}: {len(data)} bytes, but {self.size} when packing began; pack again")
        return data


def look_at(image: ImageFile) -> Entry:
    try:
        status = image.path.stat()
    except OSError as error:
        raise _unreadable(image.path, error) from error
    return Entry(image, status.st_size, status.st_mtime_ns)


def _unreadable(path: Path, error: OSError) -> DistapError:
    return DistapError(f"{path}: the image cannot be read: {error.strerror or error}")


def suffix_of(data: bytes) -> str:
    """The usual suffix, without its dot, of a file with this content, "" if its format is unknown."""
    return next((suffix for suffix, start in FIRST_BYTES.items() if data.startswith(start)), "")


def field_of(path: Path, data: bytes) -> str:
    """The field of an image in its sample: the file's suffix without its dot, or that of its content."""
    suffix = path.suffix.lower()
    return suffix.removeprefix(".") if suffix in IMAGE_SUFFIXES else suffix_of(data)


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


def sort_classes(names: Iterable[str]) -> list[str]:
    """Different names in the order in which classes are numbered: whole numbers by their value, others by name."""
    return sorted(set(names), key=lambda name: (len(name) if name.isdigit() else 0, name))


def _in_folders(source: Path) -> Iterator[ImageFile]:
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        for path in sorted(_files_below(folder)):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                yield ImageFile(path, folder.name)


def _files_below(folder: Path) -> Iterator[Path]:
    seen = set()  # a link may lead to a folder above it, or to one that is listed anyway
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
        else:
            seen.add(real)
            yield from (Path(parent, name) for name in names)


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


def group_of_each_class(images: Sequence[ImageFile]) -> dict[str, str]:
    """The groups by class; raise DistapError if a class has two, or a name cannot be a line of classes.txt."""
    groups: dict[str, str] = {}
    for path, name, group in images:
        known = groups.setdefault(name, group)
        if known != group:
            raise DistapError(f"{path}: class {name!r} is in group {group!r}, but in {known!r} before")
    if "" in groups:
        raise DistapError("a class has an empty name")
    for name in chain(groups, groups.values()):
        # classes.txt has a line for each class, with a tab before its group. Bytes that are no UTF-8 are surrogates.
        is_line = len(name.splitlines()) <= 1 and name == name.strip() and "\t" not in name
        if not is_line or name != name.encode(errors="replace").decode():
            unfit = "tabs, line breaks, outer spaces and bytes that are no UTF-8"
            raise DistapError(f"{name!r} cannot name a class or group: {unfit} are not allowed")
    return groups
