"""Read named columns of a list of images, from a CSV or Parquet file."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from distap.errors import DistapError

# Names of the columns that are needed, the first wins.
PATH_NAMES, CLASS_NAMES = ("path", "filename"), ("label", "class")
OPTIONAL = ("group", "split", "is_query", "is_gallery")

Rows = Iterator[tuple[str, list[str]]]  # the place of each row, for messages, and its cells


def columns_and_rows(source: Path) -> tuple[list[str], Rows]:
    """Return column names in small letters, and the rows. A DistapError shows the columns if some lack."""
    with source.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    return _parquet(source) if is_parquet else _csv(source)


def _require_columns(source: Path, columns: list[str]) -> None:
    if not (set(columns) & set(PATH_NAMES) and set(columns) & set(CLASS_NAMES)):
        raise DistapError(
            f"{source}: the columns found are {', '.join(columns)}; expected {' or '.join(PATH_NAMES)}, and "
            f"{' or '.join(CLASS_NAMES)}, and optionally {', '.join(OPTIONAL)}"
        )


def _csv(source: Path) -> tuple[list[str], Rows]:
    """Return the column names of a CSV, and each row's place and cells."""

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


def _parquet(source: Path) -> tuple[list[str], Rows]:
    """Return the used columns of a Parquet file and their rows, like `columns_and_rows`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DistapError(f"{source}: reading Parquet needs pyarrow: pip install 'distap[parquet]'") from error
    try:
        names = {name.lower(): name for name in parquet.read_schema(source).names}
        _require_columns(source, list(names))
        used = [name for name in names if name in (*PATH_NAMES, *CLASS_NAMES, *OPTIONAL)]
        table = parquet.read_table(source, columns=[names[name] for name in used])
    except (ArrowException, OSError) as error:
        raise DistapError(f"{source}: not a Parquet file that can be read: {error}") from error
    rows = zip(*(table.column(names[name]).to_pylist() for name in used), strict=True)
    return used, (
        (f"{source}, row {number}", ["" if cell is None else str(cell).strip() for cell in row])
        for number, row in enumerate(rows, 1)
    )
