"""Google Landmarks v2 (Weyand et al. 2020): training, index (the gallery), and the queries of ground truth 2.1."""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import GROUND_TRUTH_FILE, Count, Dataset, Record, Split
from distap.data.converters.lists import Line, list_file, read_lines, read_table
from distap.data.shards.sources import ImageFile

IDENTIFIER = re.compile(r"[0-9a-f]{16}")
USAGES = ("Public", "Private", "Ignored")


def _clean(source: Path) -> Iterator[ImageFile]:
    """The cleaned training set: a line a landmark, its images between spaces."""
    for line in read_table(_list(source, "train_clean.csv"), ("landmark_id", "images"), ","):
        landmark = str(line.integer(0, "landmark"))
        for name in line.cells[1].split():
            yield ImageFile(_path(line, source / "train", name), landmark)


def _full(source: Path) -> Iterator[ImageFile]:
    """The whole training set; its second column is an address, which may have commas in it."""
    file = _list(source, "train.csv")
    for line in read_lines(file, "\n"):
        try:
            cells = next(csv.reader(line.cells))
        except csv.Error as error:
            raise line.wrong(str(error)) from error
        if line.number == 1 and cells == ["id", "url", "landmark_id"]:
            continue
        line = Line(file, line.number, cells)
        if len(cells) != 3:
            raise line.wrong(f"{len(cells)} columns, expected three: id,url,landmark_id")
        yield ImageFile(_path(line, source / "train", cells[0]), str(line.integer(2, "landmark")))


def _unlabelled(name: str, folder: str) -> Callable[[Path], Iterator[ImageFile]]:
    """Each image a class of its own, called by its id: that is what the ground truth speaks of."""

    def images(source: Path) -> Iterator[ImageFile]:
        for line in read_table(_list(source, name), ("id",), ","):
            yield ImageFile(_path(line, source / folder, line.cells[0]), line.cells[0])

    return images


def _queries(source: Path) -> Iterator[ImageFile]:
    for line in _solutions(source):
        yield ImageFile(_path(line, source / "test", line.cells[0]), line.cells[0])


def _ground_truth(source: Path) -> Any:
    queries = []
    for line in _solutions(source):
        positives = line.cells[1].split()
        for name in positives:
            _identifier(line, name)
        queries.append({"name": _identifier(line, line.cells[0]), "usage": line.cells[2], "positives": positives})
    return {"dataset": "gldv2", "query": "query", "gallery": ["index"], "queries": queries}


def _solutions(source: Path) -> Iterator[Line]:
    """Lines of the test images that are evaluated; most are not, since they show no landmark of the index."""
    for line in read_table(_list(source, "retrieval_solution_v2.1.csv"), ("id", "images", "Usage"), ","):
        if line.cells[2] not in USAGES:
            raise line.wrong(f"usage {line.cells[2][:60]!r}, expected one of {', '.join(USAGES)}")
        if line.cells[2] != "Ignored":
            yield line


def _list(source: Path, name: str) -> Path:
    # Beside the images, or in the folders of the authors' addresses.
    return list_file(source, name, f"metadata/{name}", f"ground_truth/{name}")


def _path(line: Line, folder: Path, name: str) -> Path:
    first = _identifier(line, name)
    return folder.joinpath(first[0], first[1], first[2], f"{name}.jpg")


def _identifier(line: Line, name: str) -> str:
    if not IDENTIFIER.fullmatch(name):
        raise line.wrong(f"image {name[:60]!r}, expected 16 digits from 0 to f")
    return name


DATASET = Dataset(
    "Google Landmarks v2",
    "https://github.com/cvdfoundation/google-landmark",
    (
        Split("train", _clean, (Count(1_580_470, 81_313),)),
        Split("index", _unlabelled("index.csv", "index"), (Count(761_757, 761_757),)),
        Split("query", _queries, record=Record(GROUND_TRUTH_FILE, _ground_truth)),
        Split("train_full", _full, (Count(4_132_914, 203_094),), on_request=True),
        Split("test", _unlabelled("test.csv", "test"), (Count(117_577, 117_577),), on_request=True),
    ),
)
