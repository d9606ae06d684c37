"""Revisited Oxford and Paris, and their million distractors (Radenović et al. 2018).

A query or gallery image is a class of its own, called by its name, because the ground truth names easy, hard and junk
images one by one. Distractors are one class that no ground truth names.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import GROUND_TRUTH_FILE, Count, Dataset, ListLine, Split, read_table
from distap.data.converters.pickles import PlainValue, read_plain_pickle
from distap.data.shards.image_files import IMAGE_SUFFIXES, ImageFile

SITE = "http://cmp.felk.cvut.cz/revisitop"


def _images(source: Path, file: Path, key: str) -> Iterator[ImageFile]:
    for place, name in enumerate(read_plain_pickle(file)[key].names(), 1):
        # Errors name the place in the pickle as a line of a list.
        yield ImageFile(ListLine(file, place, [name]).path(source / "jpg", _with_suffix(name)), name)


def _ground_truth(file: Path, dataset: str) -> dict[str, Any]:
    contents = read_plain_pickle(file)
    gallery, queries = contents["imlist"].names(), contents["qimlist"].names()
    judgements = contents["gnd"].items()
    if len(judgements) != len(queries):
        raise contents.wrong(f"has {len(queries)} queries, but ground truth of {len(judgements)}")
    return {
        "dataset": dataset,
        "query": "query",
        "gallery": ["gallery"],
        "queries": [
            {"name": query, "box": _box(judgement["bbx"])}
            | {
                grade: [gallery[place] for place in judgement[grade].integers(len(gallery))]
                for grade in ("easy", "hard", "junk")
            }
            for query, judgement in zip(queries, judgements, strict=True)
        ],
    }


def _box(box: PlainValue) -> list[float]:
    edges = [edge.value for edge in box.items()]
    if len(edges) != 4 or not all(isinstance(edge, int | float) for edge in edges):
        raise box.wrong(f"is {edges!r:.80}, expected left, top, right and bottom")
    left, top, right, bottom = map(float, edges)
    if not (left < right and top < bottom):
        raise box.wrong(f"is empty: {edges!r:.80}")
    return [left, top, right, bottom]


def _distractors(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("path",), heading=False):
        name = _with_suffix(line.cells[0].removeprefix("jpg/"))
        yield ImageFile(line.path(source / "jpg", name), "distractor")


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in IMAGE_SUFFIXES else f"{name}.jpg"


def _revisited(dataset: str, title: str, gallery: int) -> Dataset:
    lists = (f"gnd_{dataset}.pkl",)
    record = GROUND_TRUTH_FILE, partial(_ground_truth, dataset=dataset)
    return Dataset(
        title,
        SITE,
        (
            Split("query", lists, partial(_images, key="qimlist"), (Count(70, 70),), record=record),
            Split("gallery", lists, partial(_images, key="imlist"), (Count(gallery, gallery),)),
        ),
    )


OXFORD = _revisited("roxford5k", "Revisited Oxford", 4_993)
PARIS = _revisited("rparis6k", "Revisited Paris", 6_322)
DISTRACTORS = Dataset(
    "distractors of Revisited Oxford and Paris",
    SITE,
    (Split("distractors", ("revisitop1m.txt",), _distractors, (Count(1_001_001, 1),)),),
)
