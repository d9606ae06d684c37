"""Converters of ILIAS, re-identification, place recognition and UnED, each with its ground truth.

Except for UnED, every query and gallery image is a class of its own, called by its path, because
the truth names images one by one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distap.data.converters.dataset import (
    DATASETS,
    Count,
    Dataset,
    Split,
    ground_truth,
    read_objects,
)
from distap.data.images.formats import IMAGE_SUFFIXES
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine, read_lines
from distap.errors import DistapError

OF_PEOPLE = ["mAP", "CMC@1", "CMC@5", "CMC@10"]
OF_PLACES = ["R@1", "R@5", "R@10", "R@20"]
# Bounds of the groups of positives, by their share of the image and by the number of other objects
# in it.
SCALES = (0.06880213760855043, 0.13526567164179104, 0.2729876723163842)
CLUTTERS = (18, 33, 53)
PERSON = re.compile(r"(-1|\d{4,})_c(\d+)")  # identity and camera at the beginning of a file's name

UTM = re.compile(r"@(\d+(?:\.\d+)?)@(\d+(?:\.\d+)?)@")  # east and north


def _listed(source: Path, file: Path) -> Iterator[ImageFile]:
    """Yield the images of a list of ILIAS, whose lines begin with a path."""
    for line in read_lines(file, ","):
        yield ImageFile(line.path(source / "ilias_core", line.cells[0]), line.cells[0])


def _ilias(file: Path) -> dict[str, Any]:
    positives = defaultdict[str, list[tuple[str, int]]](list)
    for line in read_lines(file.with_name("positive_ids.txt"), ","):
        try:
            name = line.cells[0]
            scale = float(line.cells[1])
            clutter = int(line.cells[2])
        except (IndexError, ValueError) as error:
            raise line.wrong("expected the path of an image, its scale and its clutter") from error
        place = sum(scale >= bound for bound in SCALES), sum(clutter >= bound for bound in CLUTTERS)
        positives[name.split("/")[0]].append((name, 1 + 4 * place[0] + place[1]))
    queries = []
    for line in read_lines(file, ","):
        found = positives[line.cells[0].split("/")[0]]
        names = [name for name, _ in found]
        grades = [grade for _, grade in found]
        queries.append({"name": line.cells[0], "positives": names, "grades": grades})
    groups = {"": list(range(1, 17))}
    groups |= {
        f"scale {number + 1}": [1 + 4 * number + each for each in range(4)] for number in range(4)
    }
    groups |= {
        f"clutter {number + 1}": [1 + 4 * each + number for each in range(4)] for number in range(4)
    }
    return ground_truth(queries, dataset="ilias", figures=["mAP@1000"], groups=groups)


DATASETS["ilias"] = Dataset(  # Kordopatis-Zilos et al. 2025; distractors are shards of their own
    Split("query", "image_query_ids.txt", _listed, (Count(1_232, 1_232),), truth=_ilias),
    Split("gallery", "positive_ids.txt", _listed, (Count(4_715, 4_715),)),
    folders=("image_ids", ""),
)


def _in_folder(folder: Path) -> Iterator[ListLine]:
    """Yield the images of a folder as the lines of a list."""
    if not folder.is_dir():
        raise DistapError(f"{folder}: no such folder")
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    yield from (ListLine(folder, number, [name]) for number, name in enumerate(names, 1))


class Seen(NamedTuple):
    """An image of a re-identification data set: who was seen, and by which camera."""

    line: ListLine
    name: str  # path within the data set
    identity: str
    camera: str


def _seen(file: Path) -> Iterator[Seen]:
    """Yield the images of a folder or of a list, by their names; identity -1 marks images that do
    not count.
    """
    folder = file.stem.replace("name_", "image_")
    for line in _in_folder(file) if file.is_dir() else read_lines(file):
        if file.stem.startswith("list_"):  # MSMT17: 0001/0001_000_07_0303morning_0020.jpg 1
            parts = Path(line.cells[0]).stem.split("_")
            if len(line.cells) != 2 or len(parts) < 3:
                raise line.wrong(
                    "expected the path of an image, such as 0001/0001_000_07_x.jpg, and its"
                    " identity"
                )
            folder = "train" if file.stem in ("list_train", "list_val") else "test"
            yield Seen(line, f"{folder}/{line.cells[0]}", line.cells[1], parts[2])
        elif found := PERSON.match(line.cells[0]):
            if found[1] != "-1":
                yield Seen(line, f"{folder}/{line.cells[0]}", found[1], found[2])
        else:
            raise line.wrong(
                f"{line.cells[0][:200]!r}: expected a name such as 0002_c1s1_000451_03.jpg"
            )


def _people(source: Path, file: Path, by_identity: bool) -> Iterator[ImageFile]:
    for each in _seen(file):
        yield ImageFile(
            each.line.path(source, each.name), each.identity if by_identity else each.name
        )


def _met_again(file: Path, gallery: str) -> dict[str, Any]:
    """Return the truth of re-identification: by another camera an identity is right, by the same
    one it is junk.
    """
    by_identity = defaultdict[str, list[Seen]](list)
    for each in _seen(file.with_name(gallery)):
        by_identity[each.identity].append(each)
    queries = []
    for query in _seen(file):
        found = by_identity[query.identity]
        same = [each.name for each in found if each.camera == query.camera]
        positives = [each.name for each in found if each.camera != query.camera]
        queries.append({"name": query.name, "positives": positives, "junk": same})
    return ground_truth(queries, dataset="re-identification", figures=OF_PEOPLE)


def _reidentification(lists: tuple[str, str, str], *counts: Count) -> Dataset:
    train, query, gallery = lists
    own = partial(_people, by_identity=False)
    splits = (
        Split("train", train, partial(_people, by_identity=True), counts[:1]),
        Split("query", query, own, counts[1:2], truth=partial(_met_again, gallery=gallery)),
        Split("gallery", gallery, own, counts[2:]),
    )
    return Dataset(*splits)


# Zheng et al. 2015; 3,819 images of nobody (-1) are left out
DATASETS["market-1501"] = _reidentification(
    ("bounding_box_train", "query", "bounding_box_test"),
    *(Count(12_936, 751), Count(3_368, 3_368), Count(15_913, 15_913)),
)
DATASETS["msmt17"] = _reidentification(  # Wei et al. 2018
    ("list_train.txt", "list_query.txt", "list_gallery.txt"),
    *(Count(30_248, 1_041), Count(11_659, 11_659), Count(82_161, 82_161)),
)
DATASETS["veri-776"] = _reidentification(  # Liu et al. 2016
    ("name_train.txt", "name_query.txt", "name_test.txt"),
    *(Count(37_778, 576), Count(1_678, 1_678), Count(11_579, 11_579)),
)


def _views(source: Path, file: Path) -> Iterator[ImageFile]:
    return (ImageFile(file / line.cells[0], line.cells[0]) for line in _in_folder(file))


def _places(file: Path) -> dict[str, Any]:
    """Return the truth of place recognition: names begin with @EAST@NORTH@, in metres of UTM."""
    positions: dict[str, tuple[float, float]] = {}
    for folder in (file, file.with_name("database")):
        for line in _in_folder(folder):
            name = line.cells[0]
            found = UTM.match(name)
            if found is None:
                raise line.wrong(f"{name!r}: expected @EAST@NORTH@....jpg")
            positions[name] = float(found[1]), float(found[2])
    queries = [{"name": line.cells[0]} for line in _in_folder(file)]
    return ground_truth(queries, dataset="places", figures=OF_PLACES, positions=positions)


# the layout of Berton et al. 2022 for Pitts30k, MSLS, Tokyo 24/7, SF-XL and others
DATASETS["places"] = Dataset(
    Split("query", "queries", _views, truth=_places),
    Split("gallery", "database", _views),
    folders=("", "images/test", "test"),
)


# domains of UnED
OF_THEMSELVES = ("cars", "sop", "inat", "food2k", "rp2k")
OF_AN_INDEX = ("inshop", "met", "gldv2")


def _universal(source: Path, file: Path, domains: tuple[str, ...]) -> Iterator[ImageFile]:
    """Yield the images of a split of some domains, each from a list as JSON, whose errors name
    places as lines.
    """
    for domain in domains:
        listed = file.parents[1] / domain / file.name
        for number, (name, found) in enumerate(read_objects(listed, "path", "class_id"), 1):
            path = ListLine(listed, number, []).path(source / "images", str(name))
            # A query with several landmarks has several classes.
            classes = found if isinstance(found, list) else [found]
            yield ImageFile(path, "|".join(f"{domain}/{one}" for one in classes))


def _by_classes(_: Path) -> dict[str, Any]:
    splits = {"query": ["test", "query"], "gallery": ["test", "index"]}
    return {"dataset": "uned", "figures": ["mP@5/min", "R@1"], **splits}


def _of_domains(
    name: str, file: str, domains: tuple[str, ...], *counts: Count, **more: Any
) -> Split:
    return Split(
        name, f"{domains[0]}/{file}.json", partial(_universal, domains=domains), counts, **more
    )


DATASETS["uned"] = Dataset(  # Ypsilantis et al. 2023: one index of eight domains
    _of_domains("train", "train", OF_THEMSELVES + OF_AN_INDEX, Count(2_831_222, 316_446)),
    _of_domains("test", "test", OF_THEMSELVES, Count(225_636), truth=_by_classes),
    _of_domains("query", "test", OF_AN_INDEX, Count(16_350)),
    _of_domains("index", "index", OF_AN_INDEX, Count(1_171_490)),
    folders=("info_files",),
)
