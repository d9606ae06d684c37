"""Revisited Oxford and Paris, their million distractors, and retrieval-SfM-120k, all by Radenović et al.

A query or gallery image is a class of its own, called by its name, because the ground truth names easy, hard and junk
images one by one. Distractors are one class that no ground truth names.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, model_validator

from distap.data.converters.dataset import DATASETS, Count, Dataset, Split, ground_truth, read_table
from distap.data.converters.pickles import Name, read_plain_pickle
from distap.data.images.formats import IMAGE_SUFFIXES
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine
from distap.errors import DistapError

SITE = "http://cmp.felk.cvut.cz/revisitop"
OF_REVISITED = ["mAP/trapezoids", "mP@1/last", "mP@5/last", "mP@10/last"]
DIFFICULTIES = {"Easy": [1], "Medium": [1, 2], "Hard": [2]}  # grades of easy and hard images; the other is junk


class Judgement(BaseModel):
    bbx: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]
    easy: list[NonNegativeInt]
    hard: list[NonNegativeInt]
    junk: list[NonNegativeInt]


class Revisited(BaseModel):
    """Check the contents of gnd_roxford5k.pkl and gnd_rparis6k.pkl."""

    imlist: list[Name]
    qimlist: list[Name]
    gnd: list[Judgement]

    @model_validator(mode="after")
    def _fits(self) -> "Revisited":
        if len(self.gnd) != len(self.qimlist):
            raise ValueError(f"has {len(self.qimlist)} queries, but ground truth of {len(self.gnd)}")
        for number, one in enumerate(self.gnd):
            if (last := max(*one.easy, *one.hard, *one.junk, -1, -1)) >= len(self.imlist):
                raise ValueError(f"gnd.{number}: image {last} is none of the {len(self.imlist)} of imlist")
            if one.bbx[0] >= one.bbx[2] or one.bbx[1] >= one.bbx[3]:
                raise ValueError(f"gnd.{number}.bbx: {one.bbx}: expected left, top, right and bottom")
        return self


def _images(source: Path, file: Path, key: str) -> Iterator[ImageFile]:
    for place, name in enumerate(getattr(read_plain_pickle(file, Revisited), key), 1):
        # Errors name the place in the pickle as a line of a list.
        yield ImageFile(ListLine(file, place, [name]).path(source / "jpg", _with_suffix(name)), name)


def _ground_truth(file: Path, dataset: str) -> dict[str, Any]:
    contents, truths = read_plain_pickle(file, Revisited), []
    for query, one in zip(contents.qimlist, contents.gnd, strict=True):
        easy, hard, junk = ([contents.imlist[place] for place in places] for places in (one.easy, one.hard, one.junk))
        positives, grades = easy + hard, [1] * len(easy) + [2] * len(hard)
        truths.append({"name": query, "box": one.bbx, "positives": positives, "grades": grades, "junk": junk})
    return ground_truth(truths, dataset=dataset, figures=OF_REVISITED, groups=DIFFICULTIES)


def _distractors(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("path",), heading=0):
        name = _with_suffix(line.cells[0].removeprefix("jpg/"))
        yield ImageFile(line.path(source / "jpg", name), "distractor")


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in IMAGE_SUFFIXES else f"{name}.jpg"


def _revisited(dataset: str, title: str, gallery: int) -> Dataset:
    file, truth = f"gnd_{dataset}.pkl", partial(_ground_truth, dataset=dataset)
    queries = Split("query", file, partial(_images, key="qimlist"), (Count(70, 70),), truth=truth)
    images = Split("gallery", file, partial(_images, key="imlist"), (Count(gallery, gallery),))
    return Dataset(title, SITE, queries, images)


DATASETS["roxford5k"] = _revisited("roxford5k", "Revisited Oxford", 4_993)
DATASETS["rparis6k"] = _revisited("rparis6k", "Revisited Paris", 6_322)
DATASETS["revisitop1m"] = Dataset(
    "distractors of Revisited Oxford and Paris",
    SITE,
    Split("distractors", "revisitop1m.txt", _distractors, (Count(1_001_001, 1),)),
)


class Models(BaseModel):
    """Images of retrieval-SfM-120k.pkl, and the 3D model that each belongs to."""

    # The last six letters are folders.
    cids: list[Annotated[str, Field(pattern=r"^[0-9A-Za-z]{6,}$")]]
    cluster: list[NonNegativeInt]


class StructureFromMotion(BaseModel):
    train: Models
    val: Models


def _sfm_images(source: Path, file: Path, part: str) -> Iterator[ImageFile]:
    lists = getattr(read_plain_pickle(file, StructureFromMotion), part)
    if len(lists.cluster) != len(lists.cids):
        raise DistapError(f"{file}: {part} has {len(lists.cids)} images, but clusters of {len(lists.cluster)}")
    for name, model in zip(lists.cids, lists.cluster, strict=True):
        yield ImageFile(source.joinpath("ims", name[-2:], name[-4:-2], name[-6:-4], name), str(model))


DATASETS["sfm-120k"] = Dataset(  # Radenović et al. 2019: a class is a 3D model
    "retrieval-SfM-120k",
    "http://cmp.felk.cvut.cz/cnnimageretrieval",
    Split("train", "retrieval-SfM-120k.pkl", partial(_sfm_images, part="train"), (Count(91_642, 551),)),
    Split("validation", "retrieval-SfM-120k.pkl", partial(_sfm_images, part="val"), (Count(6_403, 162),)),
)
