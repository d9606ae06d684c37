"""Read the `ground_truth.json` of `distap data convert`: the gallery images that each query must retrieve.

It is there for Revisited Oxford and Paris, and for Google Landmarks v2. The splits of queries and gallery are shards
in folders next to it, and images are named by their classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distap.data.images.cropping import Box
from distap.data.images.image_sets import ImageSet
from distap.errors import DistapError
from distap.retrieval.descriptor_files import reading
from distap.retrieval.figures import LANDMARKS, REVISITED
from distap.retrieval.truth import ListedTruth
from distap.storage.texts import read_json


class Form(NamedTuple):
    """The fields of a query's record in a ground truth, and the figures of such data sets."""

    figures: tuple[str, ...]
    grades: tuple[str, ...]  # lists of positives, one for each grade
    groups: Mapping[str, Sequence[int] | None]  # see `ListedTruth`
    others: tuple[str, ...]  # further fields that a record must have
    junk: str | None = None  # list of images that do not count
    part: str | None = None  # of the queries, see `ListedTruth`


DIFFICULTIES = {"Easy": (0,), "Medium": (0, 1), "Hard": (1,)}
OF_BUILDINGS = Form(REVISITED, ("easy", "hard"), DIFFICULTIES, ("name", "box"), junk="junk")
FORMS = {
    "roxford5k": OF_BUILDINGS,
    "rparis6k": OF_BUILDINGS,
    "gldv2": Form(LANDMARKS, ("positives",), {"": None}, ("name",), part="usage"),
}


@dataclass(frozen=True)
class GroundTruth:
    """The contents of a `ground_truth.json`."""

    dataset: str  # one of FORMS
    query: str  # split of the queries
    gallery: tuple[str, ...]  # splits of the gallery
    records: tuple[Mapping[str, Any], ...]  # of the queries

    @property
    def form(self) -> Form:
        return FORMS[self.dataset]

    def boxes(self, queries: ImageSet) -> dict[int, Box]:
        """Return the box to describe of each query with one, in whole pixels, by image number.

        Raises:
            DistapError: a query is not among the images, or its box is none.
        """
        number = {name: place for place, name in enumerate(queries.classes.tolist())}
        absent = [record["name"] for record in self.records if record["name"] not in number]
        if absent:
            raise DistapError(f"{queries.name}: query {absent[0]} and {len(absent) - 1} more are not in it")
        found = dict[int, Box]()
        for name, box in ((record["name"], record["box"]) for record in self.records if "box" in record):
            left, top, right, bottom = map(round, box) if len(box) == 4 else (0, 0, 0, 0)
            if left >= right or top >= bottom:
                raise DistapError(f"{queries.name}: box {box} of {name}; expected left, top, right, bottom")
            found[number[name]] = left, top, right, bottom
        return found


def listed_truth(
    form: Form, records: Sequence[Mapping[str, Any]], names: Sequence[str], device: torch.device
) -> ListedTruth:
    """Return each query's truth, from its record and the names of the gallery's images.

    Of images with the same name, the first is meant.
    """
    row = {name: place for place, name in reversed(list(enumerate(names)))}

    def rows(record: Mapping[str, Any], field: str) -> list[int]:
        listed = dict.fromkeys(record[field])
        if missing := [name for name in listed if name not in row]:
            raise DistapError(
                f"query {record['name']}: {len(missing)} of its {len(listed)} {field} images are not in the "
                f"gallery ({', '.join(missing[:3])}, ...); extract the gallery that the ground truth is for"
            )
        return [row[name] for name in listed]

    positives = [[rows(record, grade) for grade in form.grades] for record in records]
    return ListedTruth(
        len(names),
        [[row for found in own for row in found] for own in positives],
        None if form.junk is None else [rows(record, form.junk) for record in records],
        [[grade for grade, found in enumerate(own) for _ in found] for own in positives],
        form.groups,
        () if form.part is None else [str(record[form.part]) for record in records],
        device,
    )


def read_ground_truth(path: Path) -> GroundTruth:
    """Read a ground truth of `distap data convert`, or raise a DistapError."""
    with reading(path, "distap data convert"):
        found = read_json(path)
        truth = GroundTruth(found["dataset"], found["query"], tuple(found["gallery"]), tuple(found["queries"]))
        if truth.dataset in FORMS:
            form = truth.form
            for record in truth.records:
                for name in (*form.others, *form.grades, *filter(None, (form.junk, form.part))):
                    record[name]
    if truth.dataset not in FORMS:
        raise DistapError(f"{path}: dataset {truth.dataset!r} has no protocol here; expected {', '.join(FORMS)}")
    for split in (truth.query, *truth.gallery):
        if not isinstance(split, str) or Path(split).name != split:
            raise DistapError(f"{path}: split {split!r} is not the name of a folder beside it")
    return truth
