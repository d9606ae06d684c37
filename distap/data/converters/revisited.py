"""Revisited Oxford and Paris, and their million distractors (Radenović et al. 2018).

A query or gallery image is a class of its own, called by its name, since the ground truth tells easy, hard and junk
images by name. Distractors are one class that no ground truth speaks of.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import GROUND_TRUTH_FILE, Count, Dataset, Record, Split
from distap.data.converters.lists import Line, list_file, read_table
from distap.data.converters.pickles import integers, items, load_plain, member, names
from distap.data.shards.sources import IMAGE_SUFFIXES, ImageFile
from distap.errors import DistapError

SITE = "http://cmp.felk.cvut.cz/revisitop"
DISTRACTOR = "distractor"
GRADES = ("easy", "hard", "junk")


def _images(dataset: str, key: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        file = list_file(source, f"gnd_{dataset}.pkl")
        for place, name in enumerate(names(file, member(file, load_plain(file), key), key), 1):
            # The place in the list stands for the line in which a path is written.
            yield ImageFile(Line(file, place, [name]).path(source / "jpg", _with_suffix(name)), name)

    return images


def _ground_truth(dataset: str) -> Callable[[Path], Any]:
    def ground_truth(source: Path) -> Any:
        file = list_file(source, f"gnd_{dataset}.pkl")
        contents = load_plain(file)
        gallery = names(file, member(file, contents, "imlist"), "imlist")
        queries = names(file, member(file, contents, "qimlist"), "qimlist")
        judged = items(file, member(file, contents, "gnd"), "gnd")
        if len(judged) != len(queries):
            raise DistapError(f"{file}: {len(queries)} queries, but ground truth of {len(judged)}")
        return {
            "dataset": dataset,
            "query": "query",
            "gallery": ["gallery"],
            "queries": [
                {"name": query, "box": _box(file, judgement, f"gnd[{place}]")}
                | {grade: _graded(file, judgement, f"gnd[{place}]", grade, gallery) for grade in GRADES}
                for place, (query, judgement) in enumerate(zip(queries, judged, strict=True))
            ],
        }

    return ground_truth


def _box(file: Path, judgement: Any, where: str) -> list[float]:
    box = items(file, member(file, judgement, "bbx", where), f"{where}['bbx']")
    if len(box) != 4 or not all(isinstance(edge, int | float) for edge in box):
        raise DistapError(f"{file}: {where}['bbx'] is {list(box)!r:.80}, expected left, top, right and bottom")
    left, top, right, bottom = (float(edge) for edge in box)
    if not (left < right and top < bottom):
        raise DistapError(f"{file}: {where}['bbx'] is empty: {list(box)!r:.80}")
    return [left, top, right, bottom]


def _graded(file: Path, judgement: Any, where: str, grade: str, gallery: list[str]) -> list[str]:
    what = f"{where}[{grade!r}]"
    return [gallery[place] for place in integers(file, member(file, judgement, grade, where), what, len(gallery))]


def _distractors(source: Path) -> Iterator[ImageFile]:
    for line in read_table(list_file(source, "revisitop1m.txt"), ("path",), heading=False):
        name = _with_suffix(line.cells[0].removeprefix("jpg/"))
        yield ImageFile(line.path(source / "jpg", name), DISTRACTOR)


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in IMAGE_SUFFIXES else f"{name}.jpg"


def _revisited(dataset: str, title: str, gallery: int) -> Dataset:
    record = Record(GROUND_TRUTH_FILE, _ground_truth(dataset))
    return Dataset(
        title,
        SITE,
        (
            Split("query", _images(dataset, "qimlist"), (Count(70, 70),), record=record),
            Split("gallery", _images(dataset, "imlist"), (Count(gallery, gallery),)),
        ),
    )


OXFORD = _revisited("roxford5k", "Revisited Oxford", 4_993)
PARIS = _revisited("rparis6k", "Revisited Paris", 6_322)
DISTRACTORS = Dataset(
    "distractors of Revisited Oxford and Paris",
    SITE,
    (Split("distractors", _distractors, (Count(1_001_001, 1),)),),
)
