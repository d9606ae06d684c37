"""Google Landmarks v2 (Weyand et al. 2020): training, index (the gallery), and the queries of ground truth 2.1."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import GROUND_TRUTH_FILE, Count, Dataset, ListLine, Split, read_table
from distap.data.shards.image_files import ImageFile

IDENTIFIER = re.compile(r"[0-9a-f]{16}")
USAGES = ("Public", "Private", "Ignored")


def _clean(source: Path, file: Path) -> Iterator[ImageFile]:
    """Yield the cleaned training set: a line per landmark, with spaces between its images."""
    for line in read_table(file, ("landmark_id", "images"), ","):
        landmark = str(line.integer(0, "landmark"))
        for name in line.cells[1].split():
            yield ImageFile(_path(line, source / "train", name), landmark)


def _full(source: Path, file: Path) -> Iterator[ImageFile]:
    columns = ["id", "url", "landmark_id"]
    for line in read_table(file, columns, ",", heading=False):
        if line.number == 1 and line.cells == columns:
            continue  # a heading, which this list need not have
        yield ImageFile(_path(line, source / "train", line.cells[0]), str(line.integer(2, "landmark")))


def _unlabelled(source: Path, file: Path, folder: str) -> Iterator[ImageFile]:
    """Yield images as classes of their own, called by their ids, by which the ground truth names them."""
    for line in read_table(file, ("id",), ","):
        yield ImageFile(_path(line, source / folder, line.cells[0]), line.cells[0])


def _queries(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in _solutions(file):
        yield ImageFile(_path(line, source / "test", line.cells[0]), line.cells[0])


def _ground_truth(file: Path) -> dict[str, Any]:
    queries = [
        {
            "name": _identifier(line, line.cells[0]),
            "usage": line.cells[2],
            "positives": [_identifier(line, name) for name in line.cells[1].split()],
        }
        for line in _solutions(file)
    ]
    return {"dataset": "gldv2", "query": "query", "gallery": ["index"], "queries": queries}


def _solutions(file: Path) -> Iterator[ListLine]:
    """Yield the lines of the test images that are evaluated; most are not, as they show no landmark of the index."""
    for line in read_table(file, ("id", "images", "Usage"), ","):
        if line.cells[2] not in USAGES:
            raise line.wrong(f"usage {line.cells[2][:60]!r}, expected one of {', '.join(USAGES)}")
        if line.cells[2] != "Ignored":
            yield line


def _path(line: ListLine, folder: Path, name: str) -> Path:
    first = _identifier(line, name)
    return folder.joinpath(first[0], first[1], first[2], f"{name}.jpg")


def _identifier(line: ListLine, name: str) -> str:
    if not IDENTIFIER.fullmatch(name):
        raise line.wrong(f"image {name[:60]!r}, expected 16 digits from 0 to f")
    return name


def _lists(name: str) -> tuple[str, ...]:
    return name, f"metadata/{name}", f"ground_truth/{name}"  # beside the images, or as in the authors' addresses


_index, _test = (partial(_unlabelled, folder=folder) for folder in ("index", "test"))
DATASET = Dataset(
    "Google Landmarks v2",
    "https://github.com/cvdfoundation/google-landmark",
    (
        Split("train", _lists("train_clean.csv"), _clean, (Count(1_580_470, 81_313),)),
        Split("index", _lists("index.csv"), _index, (Count(761_757, 761_757),)),
        Split("query", _lists("retrieval_solution_v2.1.csv"), _queries, record=(GROUND_TRUTH_FILE, _ground_truth)),
        Split("train_full", _lists("train.csv"), _full, (Count(4_132_914, 203_094),), on_request=True),
        Split("test", _lists("test.csv"), _test, (Count(117_577, 117_577),), on_request=True),
    ),
)
