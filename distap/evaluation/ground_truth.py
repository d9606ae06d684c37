"""Read a ground truth: the gallery images that each query must retrieve, and those that do not
count.

A ground truth is a JSON file, written by hand or by `distap data convert`. Only `queries` and their
names are needed:

    {"figures": ["mAP", "R@1"], "queries": [{"name": "a.jpg", "positives": ["b.jpg", "c.jpg"],
     "grades": [2, 1], "junk": ["d.jpg"],
                  "part": "cars", "box": [10, 0, 90, 60]}]}

docs/guides/evaluation.md says what each key means.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from torch.nn.functional import normalize

from distap.data.images.boxes import Box
from distap.errors import DistapError
from distap.evaluation.positions import metres_on_globe, metres_on_plane
from distap.retrieval.figures import LABELLED_FIGURES, figures_named
from distap.retrieval.row_blocks import taken
from distap.retrieval.truth import NONE, Truth, rows_by_class
from distap.storage.names import Names, composed
from distap.storage.texts import read_written_json

# of an image, or the number of its row
Name = Annotated[StrictInt | StrictStr, Field(union_mode="left_to_right")]
Position = tuple[FiniteFloat, FiniteFloat]
Grade = Annotated[int, Field(ge=1, le=64)]
# A list of folders, or one folder as a text.
Folders = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda folders: (folders,) if isinstance(folders, str) else folders),
]


class TrueQuery(BaseModel, extra="forbid", frozen=True):
    """A query, with the images that are right for it and those that do not count."""

    name: Name
    positives: tuple[Name, ...] = ()
    # of each positive: its relevance, or the number of its group
    grades: tuple[Grade, ...] | None = None
    junk: tuple[Name, ...] = ()  # images that are taken out of this query's ranking
    # of the queries, such as a domain, with figures of its own
    part: Annotated[str, AfterValidator(composed)] = ""
    # Left, top, right and bottom of the part to describe, in pixels.
    box: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat] | None = None


class GroundTruth(BaseModel, extra="forbid", frozen=True):
    """The ground truth of a set of queries."""

    # without any, those of the shards, by their classes; see `of_classes`
    queries: tuple[TrueQuery, ...] = ()
    figures: Annotated[tuple[str, ...], Field(min_length=1)] = LABELLED_FIGURES
    # names of grades; positives of others are junk to a group
    groups: dict[str, tuple[int, ...]] | None = None
    # images of each instance by its name
    instances: dict[str, Annotated[tuple[Name, ...], Field(min_length=1)]] = {}
    """The descriptors of an instance's images are averaged and normalised, and the instance
    replaces these images."""
    # of images by name; those near a query are its positives
    positions: dict[str, Position] | None = None
    # of positions: east and north, or latitude and longitude
    unit: Literal["metres", "degrees"] = "metres"
    radius: Annotated[FiniteFloat, Field(gt=0)] = 25.0  # metres up to which a position is near
    dataset: str = "ground truth"
    # Folders of shards next to the file, in which names are those of classes.
    query: Folders = ()
    gallery: Folders = ()

    @property
    def _members(self) -> dict[Name, None]:
        """Return the images of all instances, each once, in order."""
        return dict.fromkeys(image for images in self.instances.values() for image in images)

    def named_as(self, queries: Sequence[Name], gallery: Sequence[Name]) -> "GroundTruth":
        """Return this truth with the names that images have, where both differ in their Unicode
        form alone.

        Args:
            queries, gallery: names of the images of both sides.
        Raises:
            DistapError: two queries are of one image then.
        """
        of_query = Names([*queries, *self.instances]).known_as
        of_gallery = Names([*gallery, *self.instances]).known_as
        renamed = [
            query.model_copy(
                update={
                    "name": of_query(query.name),
                    "positives": tuple(map(of_gallery, query.positives)),
                    "junk": tuple(map(of_gallery, query.junk)),
                }
            )
            for query in self.queries
        ]
        refuse_repeated(renamed, self.dataset)
        # An image that is in both may have a name in each.
        instances = {
            name: tuple(
                dict.fromkeys(
                    known_as(image) for known_as in (of_query, of_gallery) for image in images
                )
            )
            for name, images in self.instances.items()
        }
        positions = {
            known_as(name): place
            for known_as in (of_query, of_gallery)
            for name, place in (self.positions or {}).items()
        }
        return self.model_copy(
            update={
                "queries": tuple(renamed),
                "instances": instances,
                "positions": positions or None,
            }
        )

    def problem(self) -> str:
        """Describe a contradiction between the keys; "" if there is none."""
        if not (self.queries or self.query):
            return "queries: expected at least one"
        members = self._members
        for query in self.queries:
            is_instance = query.name in self.instances
            if query.name in members and not is_instance:
                return f"query {query.name!r} is an image of an instance; ask for the instance"
            if query.box and is_instance:
                return (
                    f"query {query.name!r} is an instance, of several images, and can have no box"
                )
        if bool(self.query) != bool(self.gallery):
            return "query and gallery name folders next to the file; give both or neither"
        if self.unit == "degrees" and self.positions is not None:
            norths = [abs(north) for north, _ in self.positions.values()]
            if max(norths, default=0) > 90:
                return "positions in degrees are latitude, from -90 to 90, and longitude"
        return ""

    def boxes(self, where: str, names: Sequence[str]) -> dict[int, Box]:
        """Return the part to describe of each query that has a box, in whole pixels, by the place
        of its name.

        Raises:
            DistapError: a query is not among the names, or its box is empty.
        """
        number = {name: place for place, name in enumerate(names)}
        present = number.keys() | self.instances
        absent = [query.name for query in self.queries if query.name not in present]
        if absent:
            raise DistapError(
                "evaluation.missing_images",
                f"{where}: query {absent[0]} and {len(absent) - 1} more are not in it",
            )
        boxes = dict[int, Box]()
        for query in self.queries:
            if query.box is None:
                continue
            left, top, right, bottom = map(round, query.box)
            if left >= right or top >= bottom:
                raise DistapError(
                    "evaluation.wrong_truth",
                    f"{where}: box {query.box} of {query.name}; expected left, top, right, bottom",
                )
            boxes[number[str(query.name)]] = left, top, right, bottom
        return boxes

    def grouped(
        self, names: Sequence[Name], descriptors: Any, lost: Collection[Name] = ()
    ) -> tuple[list[Name], Any]:
        """Replace the images of instances by these: return names, and descriptors as a tensor or
        array of their type.

        Args:
            lost: see `of_gallery`; an instance is the mean over its other images.
        """
        if not self.instances:
            return [*names], descriptors
        row = {name: place for place, name in enumerate(names)}
        members = self._members
        missing = [image for image in members if image not in row and image not in lost]
        if missing:
            raise DistapError(
                "evaluation.missing_images",
                f"instances: their image {missing[0]!r} and {len(missing) - 1} more are not there",
            )
        groups = list[tuple[Name, list[int]]]()
        for name, images in self.instances.items():
            rows = [row[image] for image in images if image in row]
            if rows:
                groups.append((name, rows))
        groups += [(name, [place]) for place, name in enumerate(names) if name not in members]
        both = self.instances.keys() & {*names} - members.keys()
        if both:
            raise DistapError(
                "evaluation.wrong_truth",
                f"instances: {min(both)!r} is an instance, and an image that is in none",
            )
        return [name for name, _ in groups], _means(descriptors, [rows for _, rows in groups])

    def asked(self, names: Sequence[Name], descriptors: Any) -> tuple[list[TrueQuery], Any]:
        """Return the queries that are among images and instances as `grouped` names them, and their
        descriptors.
        """
        row = {name: place for place, name in enumerate(names)}
        queries = [query for query in self.queries if query.name in row]
        return queries, taken(descriptors, torch.tensor([row[query.name] for query in queries]))

    def of_gallery(
        self,
        queries: Sequence[TrueQuery],
        names: Sequence[Name],
        device: torch.device,
        is_of_itself: bool = False,
        lost: Collection[Name] = (),
    ) -> Truth:
        """Return the truth of some queries for a gallery of images by name.

        If a name repeats, take the first.

        Args:
            is_of_itself: a query that has the name of a gallery's image is that image, and leaves
                itself out.
            lost: names of images that could not be described, and are right for no query.
        """
        row = {name: place for place, name in reversed(list(enumerate(names)))}

        def rows_of(query: TrueQuery, kind: str, listed: Sequence[Name]) -> list[int]:
            missing = [str(name) for name in listed if name not in row and name not in lost]
            if missing:
                raise DistapError(
                    "evaluation.missing_images",
                    f"query {query.name}: the gallery lacks {len(missing)} of the {len(listed)}"
                    f" images that are its {kind}, first {missing[0]}; give the gallery that the"
                    " truth is for",
                )
            return [row.get(name, NONE) for name in listed]

        positives = list[list[int]]()
        grades = list[list[int]]()
        junk = list[list[int]]()
        own = [row.get(query.name, NONE) if is_of_itself else NONE for query in queries]
        for query, own_row, near in zip(queries, own, self._near(queries, names), strict=True):
            right = [*rows_of(query, "positives", query.positives), *near]
            query_grades = (1,) * len(right) if query.grades is None else query.grades
            if len(query_grades) != len(right):
                raise DistapError(
                    "evaluation.wrong_truth",
                    f"query {query.name}: {len(query_grades)} grades for {len(right)} positives",
                )
            query_junk = {*rows_of(query, "junk", query.junk)} - {NONE, own_row}
            # By row, so that an image that is named twice counts once.
            graded = dict(zip(right, query_grades, strict=True))
            for taken_out in (*query_junk, NONE, own_row):
                graded.pop(taken_out, None)
            positives.append([*graded])
            grades.append([*graded.values()])
            junk.append([*query_junk])
        return Truth(
            len(names),
            positives,
            junk,
            grades,
            self.groups or {"": None},
            [query.part for query in queries] if any(query.part for query in queries) else (),
            device,
            torch.tensor(own, device=device) if is_of_itself else None,
        )

    def of_classes(
        self,
        classes: NDArray[np.str_],
        queries: NDArray[np.int64],
        gallery: NDArray[np.int64],
        device: torch.device,
    ) -> Truth:
        """Return the truth of a file without queries, by the classes of all images and the numbers
        of both sides.

        An image of one of the query's classes, which `|` joins, is right. What stands before the
        first slash of a query's class is its domain.
        """
        rows = rows_by_class(classes[gallery])
        none = np.empty(0, np.int64)
        row = {sample: place for place, sample in enumerate(gallery.tolist())}
        own = torch.tensor([row.get(sample, NONE) for sample in queries.tolist()], device=device)
        names: list[str] = classes[queries].tolist()
        positives = [
            np.concatenate([rows.get(label, none) for label in name.split("|")]) for name in names
        ]
        domains = [name.partition("/")[0] for name in names]
        return Truth(len(gallery), positives, parts=domains, device=device, own=own)

    def _near(self, queries: Sequence[TrueQuery], names: Sequence[Name]) -> list[list[int]]:
        """Return for each query the rows of the images within the radius."""
        if self.positions is None:
            return [[] for _ in queries]
        missing = [str(query.name) for query in queries if str(query.name) not in self.positions]
        if missing:
            raise DistapError(
                "evaluation.missing_positions",
                f"query {missing[0]} and {len(missing) - 1} more have no position",
            )
        rows = np.array([row for row, name in enumerate(names) if str(name) in self.positions])
        places = np.array([self.positions[str(names[row])] for row in rows]).reshape(-1, 2)
        metres = metres_on_plane if self.unit == "metres" else metres_on_globe
        return [
            rows[metres(places, np.array(self.positions[str(query.name)])) <= self.radius].tolist()
            for query in queries
        ]


def _means(descriptors: Any, groups: Sequence[Sequence[int]]) -> Any:
    """Return the mean descriptor of each group of rows, scaled to length 1, as a tensor or array
    like the descriptors.
    """
    members = torch.tensor([row for rows in groups for row in rows])
    rows = torch.as_tensor(taken(descriptors, members))
    number = torch.arange(len(groups)).repeat_interleave(torch.tensor([*map(len, groups)]))
    sums = rows.new_zeros(len(groups), rows.shape[1], dtype=torch.float64)
    means = normalize(sums.index_add_(0, number.to(rows.device), rows.double())).to(rows.dtype)
    return means if isinstance(descriptors, torch.Tensor) else means.numpy()


def read_truth(path: Path) -> GroundTruth:
    """Read a ground truth from a file, or raise a DistapError that names the file and the key."""
    try:
        truth = parsed_truth(read_written_json(path), str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DistapError("evaluation.wrong_truth", f"{path}: {reason}") from error
    for split in (*truth.query, *truth.gallery):
        if Path(split).name != split:
            raise DistapError(
                "evaluation.wrong_truth",
                f"{path}: {split!r} is not the name of a folder next to it",
            )
    return truth


def parsed_truth(truth: Mapping[str, Any], where: str) -> GroundTruth:
    """Check a ground truth given as a mapping with the keys of its file.

    `where` names it in messages.
    """
    try:
        parsed = GroundTruth.model_validate(truth)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DistapError("evaluation.wrong_truth", f"{where}: {key}: {first['msg']}") from error
    figures_named(parsed.figures)
    refuse_repeated(parsed.queries, where)
    problem = parsed.problem()
    if problem:
        raise DistapError("evaluation.wrong_truth", f"{where}: {problem}")
    return parsed


def refuse_repeated(queries: Sequence[TrueQuery], where: str) -> None:
    """Raise a DistapError if two queries have one name."""
    [(name, count), *_] = Counter(query.name for query in queries).most_common(1) or [("", 0)]
    if count > 1:
        raise DistapError("evaluation.wrong_truth", f"{where}: query {name} stands {count} times")
