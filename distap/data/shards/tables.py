"""Read lists of images: lines of cells, and named columns of a CSV file."""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from distap.errors import DistapError
from distap.storage.names import as_on_disk, composed

# The columns of a list, and the names that they may have: the first that is there wins.
LEVELS = tuple(f"level{n}" for n in range(1, 10))  # ever coarser classes that hold the class
COLUMN_NAMES = {
    **{"path": ("path", "filename"), "label": ("label", "class"), "split": ("split",)},
    **{name: (name,) for name in LEVELS},
    "level1": ("level1", "group"),
}


class ListLine(NamedTuple):
    file: Path
    number: int  # from 1
    cells: Sequence[str]

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.number}"

    def wrong(self, problem: str) -> DistapError:
        return DistapError(f"{self.where}: {problem}")

    def of_width(self, heading: Sequence[str]) -> "ListLine":
        """Return this line; a DistapError tells one of more or fewer cells than the heading has."""
        if len(self.cells) != len(heading):
            raise self.wrong(
                f"{len(self.cells)} columns, expected {len(heading)}: {','.join(heading)}"
            )
        return self

    def integer(self, column: int, meaning: str) -> int:
        text = self.cells[column]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise self.wrong(f"{meaning} {text[:60]!r} is no whole number of 0 or more")
        return int(text)

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of the file `name` in this folder; refuse a name that leaves the
        folder."""
        parts = PurePosixPath(name).parts
        if not name.isprintable():
            raise self.wrong(f"path {name[:200]!r} is no printable text")
        if not parts or name.startswith("/") or ".." in parts:
            raise self.wrong(f"path {name[:200]!r} leaves {folder}; expected one inside")
        return as_on_disk(folder / name)


def read_lines(file: Path, separator: str | None = None) -> Iterator[ListLine]:
    """Yield non-empty lines as cells, cut at a separator (outside quotes) or, by default, at spaces
    and tabs.
    """
    csv.field_size_limit(sys.maxsize)  # cells of Google Landmarks are longer than csv expects
    number = 0
    try:
        # Excel starts UTF-8 files with a byte-order mark.
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            if separator is None:
                words = (" ".join(line.split()) for line in lines)
                reader = csv.reader(words, delimiter=" ", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.reader(lines, delimiter=separator, strict=True)
            for row in reader:
                "".join(row).encode()  # raises an error for what was no UTF-8
                number = reader.line_num
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield ListLine(file, number, cells)
    except (csv.Error, UnicodeEncodeError) as error:
        why = (
            "not a table in UTF-8, as Excel's `CSV UTF-8`"
            f" is{f': {error}' if isinstance(error, csv.Error) else ''}"
        )
        raise DistapError(f"{file}, line {number + 1}: {why}") from error
    except OSError as error:
        raise DistapError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_list(
    source: Path, renamed: Mapping[str, str]
) -> tuple[dict[str, int], Iterator[ListLine]]:
    """Return the place of each column of a list of images, and its lines.

    `renamed` has the list's own names of columns. A DistapError shows the list's columns if some
    lack.
    """
    unknown = sorted(set(renamed) - set(COLUMN_NAMES))
    if unknown:
        raise DistapError(
            f"--columns {unknown[0]}: no such column; expected some of {', '.join(COLUMN_NAMES)}"
        )
    with source.open(errors="replace") as file:
        first = file.readline()
    lines = read_lines(source, max(",;\t", key=first.count))
    heading = next(lines, ListLine(source, 1, ["path", "label"])).cells
    return _places(source, heading, renamed), (line.of_width(heading) for line in lines)


def _places(source: Path, names: Sequence[str], renamed: Mapping[str, str]) -> dict[str, int]:
    """Return the place of each column in a heading; raise a DistapError if one is missing or
    repeated.
    """
    lower = [composed(name).strip().lower() for name in names]
    places = dict[str, int]()
    foreign = {"is_query", "is_gallery"}.intersection(lower)
    if foreign:
        remedy = "name the parts in the column split instead, such as query and gallery"
        raise DistapError(f"{source}: the column {min(foreign)} is not read: {remedy}")
    for column, usual in COLUMN_NAMES.items():
        found = [
            name
            for name in ((composed(renamed[column]).lower(),) if column in renamed else usual)
            if name in lower
        ]
        if found and lower.count(found[0]) > 1:
            raise DistapError(
                f"{source}: {lower.count(found[0])} columns are called {found[0]}; expected one"
            )
        if found:
            places[column] = lower.index(found[0])
        elif column in renamed or column in ("path", "label"):
            wanted = renamed.get(column) or " or ".join(usual)
            raise DistapError(
                f"{source}: no column {wanted}; the columns found are {', '.join(names)}; expected"
                " path or filename, label or class, optionally level1 or group, level2 to level9,"
                " split, or other names by --columns"
            )
    return places
