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
    Field,
    FiniteFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from torch.nn.functional import normalize

from distap.data.images.boxes import Box
from distap.errors import DistapError
from distap.retrieval.figures import LABELLED_FIGURES, figures_named
from distap.retrieval.row_blocks import taken
from distap.retrieval.truth import NONE, Truth, rows_by_class
from distap.storage.names import Names, composed
from distap.storage.texts import read_written_json

EARTH_METRES = 6_371_008.8  # mean radius
# of an image, or the number of its row
Name = Annotated[StrictInt | StrictStr, Field(union_mode="left_to_right")]
Position = tuple[FiniteFloat, FiniteFloat]
Grade = Annotated[int, Field(ge=1, le=64)]


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
    query: tuple[str, ...] = ()
    gallery: tuple[str, ...] = ()

    def named_as(self, asking: Sequence[Name], among: Sequence[Name]) -> "GroundTruth":
        """Return this truth with the names that images have, where both differ in their Unicode
        form alone.

        Args:
            asking, among: names of the images of the queries and of the gallery.
        Raises:
            DistapError: two queries are of one image then.
        """
        asked, found = (Names([*names, *self.instances]).known_as for names in (asking, among))
        queries = list[TrueQuery]()
        for query in self.queries:
            lists = {
                "positives": tuple(map(found, query.positives)),
                "junk": tuple(map(found, query.junk)),
            }
            queries.append(query.model_copy(update={"name": asked(query.name), **lists}))
        refuse_repeated(queries, self.dataset)
        # An image that is in both may have a name in each.
        both = (asked, found)
        images = {
            name: tuple(dict.fromkeys(known(image) for known in both for image in images))
            for name, images in self.instances.items()
        }
        places = {
            known(name): place for known in both for name, place in (self.positions or {}).items()
        }
        changes = {
            "queries": tuple(queries),
            "instances": images,
            "positions": places if self.positions else None,
        }
        return self.model_copy(update=changes)

    def boxes(self, where: str, names: Sequence[str]) -> dict[int, Box]:
        """Return the part to describe of each query that has a box, in whole pixels, by the place
        of its name.

        Raises:
            DistapError: a query is not among the names, or its box is empty.
        """
        number = {name: place for place, name in enumerate(names)}
        there = number.keys() | self.instances
        absent = [query.name for query in self.queries if query.name not in there]
        if absent:
            raise DistapError(
                f"{where}: query {absent[0]} and {len(absent) - 1} more are not in it"
            )
        found = dict[int, Box]()
        for query in (query for query in self.queries if query.box is not None):
            left, top, right, bottom = map(round, query.box or ())
            if left >= right or top >= bottom:
                raise DistapError(
                    f"{where}: box {query.box} of {query.name}; expected left, top, right, bottom"
                )
            found[number[str(query.name)]] = left, top, right, bottom
        return found

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
        used = dict.fromkeys(image for images in self.instances.values() for image in images)
        missing = [image for image in used if image not in row and image not in lost]
        if missing:
            raise DistapError(
                f"instances: their image {missing[0]!r} and {len(missing) - 1} more are not there"
            )
        of_instances = (
            (name, [row[one] for one in own if one in row]) for name, own in self.instances.items()
        )
        groups: list[tuple[Name, list[int]]] = [(name, rows) for name, rows in of_instances if rows]
        groups += [(name, [place]) for place, name in enumerate(names) if name not in used]
        found, members = zip(*groups, strict=True)
        both = self.instances.keys() & {*names} - used.keys()
        if both:
            raise DistapError(
                f"instances: {min(both)!r} is an instance, and an image that is in none"
            )
        rows = torch.as_tensor(taken(descriptors, torch.from_numpy(np.concatenate(members))))
        number = torch.arange(len(found)).repeat_interleave(torch.tensor([*map(len, members)]))
        sums = rows.new_zeros(len(found), rows.shape[1], dtype=torch.float64)
        means = normalize(sums.index_add_(0, number.to(rows.device), rows.double())).to(rows.dtype)
        return [*found], means if isinstance(descriptors, torch.Tensor) else means.numpy()

    def asking(self, names: Sequence[Name], descriptors: Any) -> tuple[list[TrueQuery], Any]:
        """Return the queries that are among images and instances as `grouped` names them, and their
        descriptors.
        """
        row = {name: place for place, name in enumerate(names)}
        found = [query for query in self.queries if query.name in row]
        return found, taken(descriptors, torch.tensor([row[query.name] for query in found]))

    def of_gallery(
        self,
        asking: Sequence[TrueQuery],
        names: Sequence[Name],
        device: torch.device,
        is_of_itself: bool = False,
        lost: Collection[Name] = (),
    ) -> Truth:
        """Return the truth of some queries for a gallery of images by name; if a name repeats, take
        the first.

        Args:
            is_of_itself: a query that has the name of a gallery's image is that image, and leaves
                itself out. lost: names of images that could not be described, and are right for no
                query.
        """
        row = {name: place for place, name in reversed(list(enumerate(names)))}

        def rows(query: TrueQuery, field: Literal["positives", "junk"]) -> list[int]:
            listed = getattr(query, field)
            missing = [str(name) for name in listed if name not in row and name not in lost]
            if missing:
                raise DistapError(
                    f"query {query.name}: the gallery lacks {len(missing)} of the {len(listed)}"
                    f" images that are its {field}, first {missing[0]}; give the gallery that the"
                    " truth is for"
                )
            return [row.get(name, NONE) for name in listed]

        near = self._near(asking, names)
        graded = list[dict[int, int]]()  # grades by row: what is named twice counts once
        # rows of junk, and of the query itself
        ignored = list[set[int]]()
        own = list[int]()
        for query, places in zip(asking, near, strict=True):
            found = [*rows(query, "positives"), *places]
            grades = (1,) * len(found) if query.grades is None else query.grades
            if len(grades) != len(found):
                raise DistapError(
                    f"query {query.name}: {len(grades)} grades for {len(found)} positives"
                )
            own.append(row.get(query.name, NONE) if is_of_itself else NONE)
            ignored.append({*rows(query, "junk")} - {NONE, own[-1]})
            taken_out = ignored[-1] | {NONE, own[-1]}
            graded.append(
                {
                    one: grade
                    for one, grade in zip(found, grades, strict=True)
                    if one not in taken_out
                }
            )
        return Truth(
            len(names),
            [[*each] for each in graded],
            [[*each] for each in ignored],
            [[*each.values()] for each in graded],
            self.groups or {"": None},
            [query.part for query in asking] if any(query.part for query in asking) else (),
            device,
            torch.tensor(own, device=device) if is_of_itself else None,
        )

    def of_classes(
        self,
        classes: NDArray[np.str_],
        asking: NDArray[np.int64],
        among: NDArray[np.int64],
        device: torch.device,
    ) -> Truth:
        """Return the truth of a file without queries, by the classes of all images and the numbers
        of both sides.

        An image of one of the query's classes, which `|` joins, is right. What stands before the
        first slash of a query's class is its domain.
        """
        rows = rows_by_class(classes[among])
        none = np.empty(0, np.int64)
        row_of = dict(zip(among.tolist(), range(len(among)), strict=True))
        own = torch.tensor([row_of.get(number, NONE) for number in asking.tolist()], device=device)
        queries = classes[asking].tolist()
        found = [
            np.concatenate([rows.get(one, none) for one in name.split("|")]) for name in queries
        ]
        domains = [name.partition("/")[0] for name in queries]
        return Truth(len(among), found, parts=domains, device=device, own=own)

    def _near(self, asking: Sequence[TrueQuery], names: Sequence[Name]) -> list[list[int]]:
        """Return for each query the rows of the images within the radius."""
        if self.positions is None:
            return [[] for _ in asking]
        known = [number for number, name in enumerate(names) if str(name) in self.positions]
        missing = [str(query.name) for query in asking if str(query.name) not in self.positions]
        if missing:
            raise DistapError(f"query {missing[0]} and {len(missing) - 1} more have no position")
        given = [
            self.positions[str(name)]
            for name in (*(names[one] for one in known), *(one.name for one in asking))
        ]
        among, asked = np.split(np.array(given).reshape(-1, 2), [len(known)])
        metres = metres_on_plane if self.unit == "metres" else metres_on_globe
        near = (np.flatnonzero(metres(among, point) <= self.radius).tolist() for point in asked)
        return [[known[number] for number in own] for own in near]


def metres_on_plane(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (N,) metres between points (N, 2), east and north, and one of them."""
    return np.linalg.norm(points - point, axis=1)


def metres_on_globe(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (N,) metres of ground between points (N, 2), latitude and longitude in degrees,
    and one of them.

    The way is along the great circle of a sphere, by the haversine formula, which is exact for near
    points too.
    """
    half = np.sin(np.radians(points - point) / 2) ** 2
    parallels = np.cos(np.radians(points[:, 0])) * np.cos(np.radians(point[0]))
    haversine = np.clip(half[:, 0] + parallels * half[:, 1], 0, 1)
    return 2 * EARTH_METRES * np.arctan2(np.sqrt(haversine), np.sqrt(1 - haversine))


def read_truth(path: Path) -> GroundTruth:
    """Read a ground truth from a file, or raise a DistapError that names the file and the key."""
    try:
        truth = parsed_truth(read_written_json(path), str(path))
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    for split in (*truth.query, *truth.gallery):
        if Path(split).name != split:
            raise DistapError(f"{path}: {split!r} is not the name of a folder next to it")
    return truth


def parsed_truth(truth: Mapping[str, Any], where: str) -> GroundTruth:
    """Check a ground truth given as a mapping with the keys of its file; `where` names it in
    messages.
    """
    try:
        found = GroundTruth.model_validate(truth)
    except ValidationError as error:
        first = error.errors()[0]
        raise DistapError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    figures_named(found.figures)
    if not (found.queries or found.query):
        raise DistapError(f"{where}: queries: expected at least one")
    refuse_repeated(found.queries, where)
    averaged = {
        image for images in found.instances.values() for image in images
    } - found.instances.keys()
    inside = [query.name for query in found.queries if query.name in averaged]
    if inside:
        raise DistapError(
            f"{where}: query {inside[0]!r} is an image of an instance; ask for the instance"
        )
    boxed = [query.name for query in found.queries if query.box and query.name in found.instances]
    if boxed:
        raise DistapError(
            f"{where}: query {boxed[0]!r} is an instance, of several images, and can have no box"
        )
    if bool(found.query) != bool(found.gallery):
        raise DistapError(
            f"{where}: query and gallery name folders next to the file; give both or neither"
        )
    if found.unit == "degrees" and any(
        abs(north) > 90 for north, _ in (found.positions or {}).values()
    ):
        raise DistapError(
            f"{where}: positions in degrees are latitude, from -90 to 90, and longitude"
        )
    return found


def refuse_repeated(queries: Sequence[TrueQuery], where: str) -> None:
    """Raise a DistapError if two queries have one name."""
    [(name, times), *_] = Counter(query.name for query in queries).most_common(1) or [("", 0)]
    if times > 1:
        raise DistapError(f"{where}: query {name} stands {times} times")
