"""Declare data sets, and read the list files that their authors distribute."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from distap.data.shards.image_files import ImageFile
from distap.errors import DistapError

GROUND_TRUTH_FILE = "ground_truth.json"  # next to the splits of a data set with a list of matches for each query


class Count(NamedTuple):
    """Number of images and classes in the published list; None if no publication states it."""

    images: int | None = None
    classes: int | None = None

    def agrees(self, images: int, classes: int) -> bool:
        return self.images in (None, images) and self.classes in (None, classes)

    def __str__(self) -> str:
        return ", ".join(f"{n:,} {unit}" for n, unit in zip(self, self._fields, strict=True) if n is not None)


@dataclass(frozen=True)
class Split:
    name: str  # folder of its shards
    file: str  # the list of its images
    images: Callable[[Path, Path], Iterator[ImageFile]]  # yields the images in the list, from (source folder, list)
    published: tuple[Count, ...] = ()  # several if the authors' paper and files differ
    truth: Callable[[Path], dict[str, Any]] | None = None  # makes the contents of GROUND_TRUTH_FILE of the list


class Dataset:
    """A published data set; `site` is where its authors offer it, and `folders` of the source may hold its lists."""

    def __init__(self, title: str, site: str, *splits: Split, folders: tuple[str, ...] = ("",)) -> None:
        self.title, self.site, self.splits, self.folders = title, site, splits, folders


def ground_truth(queries: list[dict[str, Any]], gallery: str = "gallery", **about: Any) -> dict[str, Any]:
    """Return the contents of GROUND_TRUTH_FILE for the splits `query` and `gallery`."""
    return {**about, "query": ["query"], "gallery": [gallery], "queries": queries}


def find_list(source: Path, name: str, folders: Sequence[str] = ("",)) -> Path:
    """Return a list file's path in one of these folders of the source; raise a DistapError if none has it."""
    places = [source / folder / name for folder in folders]
    for place in places:
        if place.exists():
            return place
    others = "".join(f", nor {place.relative_to(source)}" for place in places[1:])
    raise DistapError(f"{places[0]}: no such file{others}")


class ListLine(NamedTuple):
    file: Path
    number: int  # from 1
    cells: Sequence[str]

    def wrong(self, problem: str) -> DistapError:
        return DistapError(f"{self.file}, line {self.number}: {problem}")

    def integer(self, column: int, meaning: str) -> int:
        text = self.cells[column]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise self.wrong(f"{meaning} {text[:60]!r} is no whole number of 0 or more")
        return int(text)

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of the file `name` in this folder; refuse a name that leaves the folder."""
        parts = PurePosixPath(name).parts
        if not name.isprintable():
            raise self.wrong(f"path {name[:200]!r} is no printable text")
        if not parts or name.startswith("/") or ".." in parts:
            raise self.wrong(f"path {name[:200]!r} leaves {folder}; expected one inside")
        return folder / name


def read_lines(file: Path, separator: str | None = None) -> Iterator[ListLine]:
    """Yield non-empty lines as cells, cut at commas (outside quotes) or, by default, at spaces and tabs."""
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                try:
                    text = raw.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    raise DistapError(f"{file}, line {number}: no text in UTF-8") from error
                if text:
                    # csv limits the length of a cell, which the long cells of Google Landmarks exceed.
                    quoted = separator == "," and '"' in text
                    yield ListLine(file, number, next(csv.reader([text])) if quoted else text.split(separator))
    except OSError as error:
        raise DistapError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_table(
    file: Path, columns: Sequence[str], separator: str | None = None, *, heading: bool = True
) -> Iterator[ListLine]:
    """Yield the lines of a table below its heading; raise a DistapError unless it has these columns."""
    expected = (separator or " ").join(columns)
    lines = read_lines(file, separator)
    if heading:
        first = next(lines, ListLine(file, 1, []))
        if list(first.cells) != list(columns):
            raise first.wrong(f"expected the heading {expected!r}")
    for line in lines:
        if len(line.cells) != len(columns):
            raise line.wrong(f"{len(line.cells)} columns, expected {len(columns)}: {expected!r}")
        yield line
