"""Read lists of images: lines of cells, and named columns of a CSV file."""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from distap.errors import DistapError, logger
from distap.storage.names import as_on_disk, composed
from distap.storage.texts import is_line

# The columns of a list, and the names that they may have: the first that is there wins.
# names of an index for what is no further column
RESERVED = ("key", "class", "label")
LEVELS = tuple(f"level{n}" for n in range(1, 10))  # ever coarser classes that hold the class
COLUMN_NAMES = {
    "path": ("path", "filename"),
    "label": ("label", "class"),
    "split": ("split",),
    **{name: (name,) for name in LEVELS},
    "level1": ("level1", "group"),
    "key": ("key",),
}


@dataclass(frozen=True)
class ListLine:
    """A line of a list, whose cells are found by their column: `line[0]`."""

    file: Path
    number: int  # from 1
    cells: Sequence[str]

    def __getitem__(self, column: int) -> str:
        return self.cells[column]

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.number}"

    def wrong(self, problem: str) -> DistapError:
        return DistapError("data.wrong_line", f"{self.where}: {problem}")

    def of_width(self, heading: Sequence[str]) -> "ListLine":
        """Return this line; raise a DistapError if it has more or fewer cells than the heading."""
        if len(self.cells) != len(heading):
            raise self.wrong(
                f"{len(self.cells)} columns, expected {len(heading)}: {','.join(heading)}"
            )
        return self

    def integer(self, column: int, meaning: str) -> int:
        text = self[column]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise self.wrong(f"{meaning} {text[:60]!r} is no whole number of 0 or more")
        return int(text)

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of the file `name` in a folder, and refuse a name that leaves it."""
        folders = PurePosixPath(name).parts
        if not name.isprintable():
            raise self.wrong(f"path {name[:200]!r} is no printable text")
        if not folders or name.startswith("/") or ".." in folders:
            raise self.wrong(f"path {name[:200]!r} leaves {folder}; expected one inside")
        return as_on_disk(folder / name)


def read_lines(file: Path, separator: str | None = None) -> Iterator[ListLine]:
    """Yield the lines that are not empty, with cells cut at a separator outside quotes.

    Without a separator, cells are cut at spaces and tabs.
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
                "".join(row).encode()  # raises an error for bytes that were no UTF-8
                number = reader.line_num
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield ListLine(file, number, cells)
    except (csv.Error, UnicodeEncodeError) as error:
        detail = f": {error}" if isinstance(error, csv.Error) else ""
        raise DistapError(
            "data.no_table",
            f"{file}, line {number + 1}: not a table in UTF-8, as Excel's `CSV UTF-8` is{detail}",
        ) from error
    except OSError as error:
        raise DistapError(
            "data.unreadable", f"{file}: cannot be read: {error.strerror or error}"
        ) from error


def read_list(
    source: Path, renamed: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int], Iterator[ListLine]]:
    """Return the place of each column of a list of images, that of each further one, and its lines.

    `renamed` maps columns to the list's own names of them. A DistapError shows the list's columns
    if some are missing.
    """
    unknown = sorted(set(renamed) - set(COLUMN_NAMES))
    if unknown:
        raise DistapError(
            "data.wrong_columns",
            f"--columns {unknown[0]}: no such column; expected some of {', '.join(COLUMN_NAMES)}",
        )
    with source.open(errors="replace") as file:
        first = file.readline()
    lines = read_lines(source, max(",;\t", key=first.count))
    heading = next(lines, ListLine(source, 1, ["path", "label"])).cells
    places = _places(source, heading, renamed)
    further = _further_places(source, heading, places)
    return places, further, (line.of_width(heading) for line in lines)


def _further_places(
    source: Path, heading: Sequence[str], places: Mapping[str, int]
) -> dict[str, int]:
    """Return the place of each column that says more of an image, by its name in the heading."""
    further = dict[str, int]()
    for place, name in enumerate(map(composed, heading)):
        if place in places.values():
            continue
        if not is_line(name) or name in further or name in RESERVED:
            logger.warning(
                "%s: column %d, %r, is dropped: its name is empty, taken, or used twice",
                source,
                place + 1,
                name,
            )
            continue
        further[name] = place
    return further


def _places(source: Path, heading: Sequence[str], renamed: Mapping[str, str]) -> dict[str, int]:
    """Return the place of each column in a heading.

    Raises a DistapError if one is missing or repeated.
    """
    names = [_in_heading(name) for name in heading]
    foreign = sorted({"is_query", "is_gallery"}.intersection(names))
    if foreign:
        raise DistapError(
            "data.wrong_columns",
            f"{source}: the column {foreign[0]} is not read: name the parts in the column split"
            " instead, such as query and gallery",
        )
    places = dict[str, int]()
    for column, usual in COLUMN_NAMES.items():
        wanted = (renamed[column],) if column in renamed else usual
        name = next((name for name in map(_in_heading, wanted) if name in names), None)
        if name is not None:
            if names.count(name) > 1:
                raise DistapError(
                    "data.wrong_columns",
                    f"{source}: {names.count(name)} columns are called {name}; expected one",
                )
            places[column] = names.index(name)
        elif column in renamed or column in ("path", "label"):
            raise DistapError(
                "data.wrong_columns",
                f"{source}: no column {' or '.join(wanted)}; the columns found are"
                f" {', '.join(heading)}; expected path or filename, label or class, optionally"
                " level1 or group, level2 to level9, split, or other names by --columns",
            )
    return places


def _in_heading(name: str) -> str:
    return composed(name).strip().lower()
