"""Revisited Oxford and Paris, their million distractors, and retrieval-SfM-120k, all by Radenović et al.

A query or gallery image is a class of its own, called by its name, because the ground truth names easy, hard and junk
images one by one. Distractors are one class that no ground truth names.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import Count, Dataset, ListLine, Split, ground_truth, read_table
from distap.data.converters.pickles import PlainValue, read_plain_pickle
from distap.data.images.formats import IMAGE_SUFFIXES
from distap.data.shards.image_files import ImageFile

SITE = "http://cmp.felk.cvut.cz/revisitop"
OF_REVISITED = ["mAP/trapezoids", "mP@1/last", "mP@5/last", "mP@10/last"]
DIFFICULTIES = {"Easy": [1], "Medium": [1, 2], "Hard": [2]}  # grades of easy and hard images; the other is junk


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
    truths = []
    for query, judgement in zip(queries, judgements, strict=True):
        easy, hard, junk = (
            [gallery[place] for place in judgement[grade].integers(len(gallery))]
            for grade in ("easy", "hard", "junk")
        )
        positives, grades = easy + hard, [1] * len(easy) + [2] * len(hard)
        box = _box(judgement["bbx"])
        truths.append({"name": query, "box": box, "positives": positives, "grades": grades, "junk": junk})
    return ground_truth(truths, dataset=dataset, figures=OF_REVISITED, groups=DIFFICULTIES)


def _box(box: PlainValue) -> list[float]:
    edges = [edge.value for edge in box.items()]
    are_numbers = len(edges) == 4 and all(isinstance(edge, int | float) for edge in edges)
    if not are_numbers or not (edges[0] < edges[2] and edges[1] < edges[3]):
        raise box.wrong(f"is {edges!r:.80}, expected left, top, right and bottom, with something between them")
    return list(map(float, edges))


def _distractors(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("path",), heading=False):
        name = _with_suffix(line.cells[0].removeprefix("jpg/"))
        yield ImageFile(line.path(source / "jpg", name), "distractor")


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in IMAGE_SUFFIXES else f"{name}.jpg"


def _revisited(dataset: str, title: str, gallery: int) -> Dataset:
    file, truth = f"gnd_{dataset}.pkl", partial(_ground_truth, dataset=dataset)
    queries = Split("query", file, partial(_images, key="qimlist"), (Count(70, 70),), truth=truth)
    images = Split("gallery", file, partial(_images, key="imlist"), (Count(gallery, gallery),))
    return Dataset(title, SITE, queries, images)


OXFORD = _revisited("roxford5k", "Revisited Oxford", 4_993)
PARIS = _revisited("rparis6k", "Revisited Paris", 6_322)
DISTRACTORS = Dataset(
    "distractors of Revisited Oxford and Paris",
    SITE,
    Split("distractors", "revisitop1m.txt", _distractors, (Count(1_001_001, 1),)),
)


def _sfm_images(source: Path, file: Path, part: str) -> Iterator[ImageFile]:
    lists = read_plain_pickle(file)[part]
    identifiers, models = lists["cids"].names(), lists["cluster"].integers()
    if len(models) != len(identifiers):
        raise lists.wrong(f"has {len(identifiers)} images, but clusters of {len(models)}")
    for item, name, model in zip(lists["cids"].items(), identifiers, models, strict=True):
        # Its last six letters are folders, so it must hold nothing but letters and digits.
        if len(name) < 6 or not (name.isascii() and name.isalnum()):
            raise item.wrong(f"is {name[:60]!r}, expected six or more letters and digits")
        yield ImageFile(source.joinpath("ims", name[-2:], name[-4:-2], name[-6:-4], name), str(model))


SFM_120K = Dataset(  # Radenović et al. 2019: a class is a 3D model
    "retrieval-SfM-120k",
    "http://cmp.felk.cvut.cz/cnnimageretrieval",
    Split("train", "retrieval-SfM-120k.pkl", partial(_sfm_images, part="train"), (Count(91_642, 551),)),
    Split("validation", "retrieval-SfM-120k.pkl", partial(_sfm_images, part="val"), (Count(6_403, 162),)),
)
