"""Converters of ILIAS, re-identification, place recognition and UnED, each with its ground truth.

Except for UnED, every query and gallery image is a class of its own, called by its path, because
the truth names images one by one.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from distap.data.converters.dataset import (
    DATASETS,
    Count,
    Dataset,
    Images,
    Split,
    Truth,
    ground_truth,
    read_objects,
)
from distap.data.images.formats import FORMAT_BY_SUFFIX
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


def _listed(source: Path, file: Path) -> Images:
    """Yield the images of a list of ILIAS, whose lines begin with a path."""
    for line in read_lines(file, ","):
        yield ImageFile(line.path(source / "ilias_core", line[0]), line[0])


def _ilias(file: Path) -> Truth:
    graded = defaultdict[str, tuple[list[str], list[int]]](lambda: ([], []))
    for line in read_lines(file.with_name("positive_ids.txt"), ","):
        try:
            scale = float(line[1])
            clutter = int(line[2])
        except (IndexError, ValueError) as error:
            raise line.wrong("expected the path of an image, its scale and its clutter") from error
        names, grades = graded[line[0].split("/")[0]]
        names.append(line[0])
        # A grade for each pair of groups: 1 to 4 for the smallest scale, and so on.
        grades.append(1 + 4 * bisect_right(SCALES, scale) + bisect_right(CLUTTERS, clutter))
    queries = []
    for line in read_lines(file, ","):
        names, grades = graded[line[0].split("/")[0]]
        queries.append({"name": line[0], "positives": names, "grades": grades})
    groups = {"": list(range(1, 17))}
    groups |= {f"scale {n + 1}": list(range(1 + 4 * n, 5 + 4 * n)) for n in range(4)}
    groups |= {f"clutter {n + 1}": list(range(1 + n, 17, 4)) for n in range(4)}
    return ground_truth("ilias", ["mAP@1000"], queries, groups=groups)


DATASETS["ilias"] = Dataset(  # Kordopatis-Zilos et al. 2025; distractors are shards of their own
    Split("query", "image_query_ids.txt", _listed, (Count(1_232, 1_232),), truth=_ilias),
    Split("gallery", "positive_ids.txt", _listed, (Count(4_715, 4_715),)),
    folders=("image_ids", ""),
)


def _in_folder(folder: Path) -> Iterator[ListLine]:
    """Yield the images of a folder as the lines of a list."""
    if not folder.is_dir():
        raise DistapError("data.missing", f"{folder}: no such folder")
    names = sorted(
        path.name for path in folder.iterdir() if path.suffix.lower() in FORMAT_BY_SUFFIX
    )
    for number, name in enumerate(names, 1):
        yield ListLine(folder, number, [name])


class Sighting(NamedTuple):
    """An image of a re-identification data set: who was seen, and by which camera."""

    line: ListLine
    name: str  # path within the data set
    identity: str
    camera: str


def _sightings(file: Path) -> Iterator[Sighting]:
    """Yield the images of a folder or of a list, by their names.

    Identity -1 marks images that do not count.
    """
    if file.stem.startswith("list_"):
        yield from _msmt_sightings(file)
        return
    folder = file.stem.replace("name_", "image_")
    for line in _in_folder(file) if file.is_dir() else read_lines(file):
        person = PERSON.match(line[0])
        if not person:
            raise line.wrong(f"{line[0][:200]!r}: expected a name such as 0002_c1s1_000451_03.jpg")
        if person[1] != "-1":
            yield Sighting(line, f"{folder}/{line[0]}", person[1], person[2])


def _msmt_sightings(file: Path) -> Iterator[Sighting]:
    """Yield the images of a list of MSMT17: 0001/0001_000_07_0303morning_0020.jpg 1."""
    folder = "train" if file.stem in ("list_train", "list_val") else "test"
    for line in read_lines(file):
        words = Path(line[0]).stem.split("_")
        if len(line.cells) != 2 or len(words) < 3:
            raise line.wrong(
                "expected the path of an image, such as 0001/0001_000_07_x.jpg, and its identity"
            )
        yield Sighting(line, f"{folder}/{line[0]}", line[1], words[2])


def _people(source: Path, file: Path) -> Images:
    for seen in _sightings(file):
        yield ImageFile(seen.line.path(source, seen.name), seen.identity)


def _images_of_people(source: Path, file: Path) -> Images:
    for seen in _sightings(file):
        yield ImageFile(seen.line.path(source, seen.name), seen.name)


def _met_again(file: Path, gallery: str) -> Truth:
    """Return the truth of re-identification.

    Images of the same person are positives if another camera took them, and junk otherwise.
    """
    by_identity = defaultdict[str, list[Sighting]](list)
    for seen in _sightings(file.with_name(gallery)):
        by_identity[seen.identity].append(seen)
    queries = []
    for query in _sightings(file):
        alike = by_identity[query.identity]
        junk = [seen.name for seen in alike if seen.camera == query.camera]
        positives = [seen.name for seen in alike if seen.camera != query.camera]
        queries.append({"name": query.name, "positives": positives, "junk": junk})
    return ground_truth("re-identification", OF_PEOPLE, queries)


def _reidentification(lists: tuple[str, str, str], *counts: Count) -> Dataset:
    train, query, gallery = lists
    of_train, of_query, of_gallery = counts
    truth = partial(_met_again, gallery=gallery)
    return Dataset(
        Split("train", train, _people, (of_train,)),
        Split("query", query, _images_of_people, (of_query,), truth),
        Split("gallery", gallery, _images_of_people, (of_gallery,)),
    )


# Zheng et al. 2015; 3,819 images of nobody (-1) are left out
DATASETS["market-1501"] = _reidentification(
    ("bounding_box_train", "query", "bounding_box_test"),
    Count(12_936, 751),
    Count(3_368, 3_368),
    Count(15_913, 15_913),
)
DATASETS["msmt17"] = _reidentification(  # Wei et al. 2018
    ("list_train.txt", "list_query.txt", "list_gallery.txt"),
    Count(30_248, 1_041),
    Count(11_659, 11_659),
    Count(82_161, 82_161),
)
DATASETS["veri-776"] = _reidentification(  # Liu et al. 2016
    ("name_train.txt", "name_query.txt", "name_test.txt"),
    Count(37_778, 576),
    Count(1_678, 1_678),
    Count(11_579, 11_579),
)


def _views(source: Path, file: Path) -> Images:
    return (ImageFile(file / line[0], line[0]) for line in _in_folder(file))


def _places(file: Path) -> Truth:
    """Return the truth of place recognition: names begin with @EAST@NORTH@, in metres of UTM."""
    positions: dict[str, tuple[float, float]] = {}
    for line in chain(_in_folder(file), _in_folder(file.with_name("database"))):
        position = UTM.match(line[0])
        if position is None:
            raise line.wrong(f"{line[0]!r}: expected @EAST@NORTH@....jpg")
        positions[line[0]] = float(position[1]), float(position[2])
    queries = [{"name": line[0]} for line in _in_folder(file)]
    return ground_truth("places", OF_PLACES, queries, positions=positions)


# the layout of Berton et al. 2022 for Pitts30k, MSLS, Tokyo 24/7, SF-XL and others
DATASETS["places"] = Dataset(
    Split("query", "queries", _views, truth=_places),
    Split("gallery", "database", _views),
    folders=("", "images/test", "test"),
)


# domains of UnED
OF_THEMSELVES = ("cars", "sop", "inat", "food2k", "rp2k")
OF_AN_INDEX = ("inshop", "met", "gldv2")
TRAINED_BY_DOMAIN = {
    "cars": Count(6_346, 78),
    "sop": Count(48_942, 9_054),
    "inshop": Count(20_897, 3_198),
    "inat": Count(273_929, 4_552),
    "met": Count(397_121, 224_408),
    "gldv2": Count(1_422_914, 73_182),
    "food2k": Count(472_349, 900),
    "rp2k": Count(188_724, 1_074),
}


def _universal(source: Path, file: Path, domains: tuple[str, ...]) -> Images:
    """Yield the images of a split of some domains, each from a list as JSON.

    Errors name places in it as lines.
    """
    for domain in domains:
        listed = file.parents[1] / domain / file.name
        for number, (name, label) in enumerate(read_objects(listed, "path", "class_id"), 1):
            path = ListLine(listed, number, []).path(source / "images", str(name))
            # A query with several landmarks has several classes.
            labels = label if isinstance(label, list) else [label]
            yield ImageFile(path, "|".join(f"{domain}/{label}" for label in labels))


def _by_classes(_: Path) -> Truth:
    return {
        "dataset": "uned",
        "figures": ["mP@5/min", "R@1"],
        "query": ["test", "query"],
        "gallery": ["test", "index"],
    }


def _of_domains(
    name: str,
    file: str,
    domains: tuple[str, ...],
    count: Count,
    truth: Callable[[Path], Truth] | None = None,
) -> Split:
    images = partial(_universal, domains=domains)
    return Split(name, f"{domains[0]}/{file}.json", images, (count,), truth)


DATASETS["uned"] = Dataset(  # Ypsilantis et al. 2023: one index of eight domains
    *(
        _of_domains(f"train-{name}", "train", (name,), count)
        for name, count in TRAINED_BY_DOMAIN.items()
    ),
    _of_domains("test", "test", OF_THEMSELVES, Count(225_636), truth=_by_classes),
    _of_domains("query", "test", OF_AN_INDEX, Count(16_350)),
    _of_domains("index", "index", OF_AN_INDEX, Count(1_171_490)),
    folders=("info_files",),
)
