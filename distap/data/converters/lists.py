"""List files of data sets, read line by line; every error names file and line.

Nothing in a list is trusted: a path may lead nowhere but into the folder that it belongs to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from distap.errors import DistapError


class MissingListError(DistapError):
    """A file that the layout of the data set has is not in the source folder."""


def list_file(source: Path, *places: str) -> Path:
    """The first of these files in the source folder that is there.

    Raises:
        MissingListError: none is.
    """
    for place in places:
        if (source / place).is_file():
            return source / place
    others = "".join(f", nor {place}" for place in places[1:])
    raise MissingListError(f"{source / places[0]}: no such file{others}")


@dataclass(frozen=True)
class Line:
    """A line of a list, cut into cells."""

    file: Path
    number: int  # from 1
    cells: Sequence[str]

    def wrong(self, what: str) -> DistapError:
        """An error that names file and line."""
        return DistapError(f"{self.file}, line {self.number}: {what}")

    def integer(self, column: int, what: str) -> int:
        """The whole number of 0 or more in a column."""
        text = self.cells[column]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise self.wrong(f"{what} {text[:60]!r} is no whole number of 0 or more")
        return int(text)

    def path(self, folder: Path, name: str) -> Path:
        """The file of that name in the folder.

        Links in the folder are followed, since some data sets are laid out with links.

        Raises:
            DistapError: the name is absolute, or leaves the folder.
        """
        parts = PurePosixPath(name).parts
        if not name.isprintable():
            raise self.wrong(f"path {name[:200]!r} is no printable text")
        if not parts or name.startswith("/") or ".." in parts:
            raise self.wrong(f"path {name[:200]!r} leaves {folder}; expected one inside")
        return folder / name


def read_lines(file: Path, separator: str | None = None) -> Iterator[Line]:
    """Lines that are not empty, cut at the separator; at runs of spaces and tabs where it is None.

    Raises:
        DistapError: the file cannot be read, or a line is no UTF-8.
    """
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                try:
                    text = raw.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    raise DistapError(f"{file}, line {number}: no text in UTF-8") from error
                if text:
                    yield Line(file, number, text.split(separator))
    except OSError as error:
        raise DistapError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_table(
    file: Path, columns: Sequence[str], separator: str | None = None, *, heading: bool = True
) -> Iterator[Line]:
    """Lines with a cell a column; a heading, where there is one, must name them.

    Raises:
        DistapError: the heading is another one, or a line has more or fewer cells.
    """
    expected = (separator or " ").join(columns)
    lines = read_lines(file, separator)
    if heading:
        first = next(lines, None)
        if first is None or list(first.cells) != list(columns):
            raise DistapError(f"{file}, line {first.number if first else 1}: expected the heading {expected!r}")
    for line in lines:
        if len(line.cells) != len(columns):
            raise line.wrong(f"{len(line.cells)} columns, expected {len(columns)}: {expected!r}")
        yield line
