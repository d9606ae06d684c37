"""Read the columns of a list of images, a CSV file, by their names."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from distap.errors import DistapError

PATH_NAMES, CLASS_NAMES = (
    ("path", "filename"),
    ("label", "class"),
)  # names of the columns that are needed, the first wins
OPTIONAL = ("group", "split")

Rows = Iterator[tuple[str, list[str]]]  # the place of each row, for messages, and its cells


def _require_columns(source: Path, columns: list[str]) -> None:
    if not (set(columns) & set(PATH_NAMES) and set(columns) & set(CLASS_NAMES)):
        raise DistapError(
            f"{source}: the columns found are {', '.join(columns)}; expected {' or '.join(PATH_NAMES)}, and "
            f"{' or '.join(CLASS_NAMES)}, and optionally {', '.join(OPTIONAL)}"
        )


def columns_and_rows(source: Path) -> tuple[list[str], Rows]:
    """Return the columns' names in small letters, and the rows; a DistapError shows the columns if some lack."""

    def rows() -> Rows:
        # Excel starts UTF-8 files with a byte-order mark.
        with source.open(newline="", encoding="utf-8-sig") as file:
            number = 0
            try:
                first = file.readline()
                file.seek(0)
                lines = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
                for row in lines:
                    number = lines.line_num
                    if any(cells := [cell.strip() for cell in row]):
                        yield f"{source}, line {number}", cells
            except (csv.Error, UnicodeDecodeError) as error:
                raise DistapError(f"{source}, line {number + 1}: not a CSV file in UTF-8: {error}") from error

    found = rows()
    where, first = next(found, ("", ["path", "label"]))
    columns = [cell.lower() for cell in first]
    if set(columns) & {*PATH_NAMES, *CLASS_NAMES, *OPTIONAL}:
        _require_columns(source, columns)
        return columns, found
    if len(first) not in (2, 3) or not (first[1].isascii() and first[1].removeprefix("-").isdigit()):
        _require_columns(source, first)
    return ["path", "label", "group"][: len(first)], chain([(where, first)], found)
