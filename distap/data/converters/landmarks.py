"""Converters of Landmarks-clean, Google Landmarks v2 and its hierarchical labels."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from distap.data.converters.dataset import DATASETS, Count, Dataset, Split, ground_truth, read_table
from distap.data.labels import class_name
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine, read_lines

ADDRESS = re.compile(r"(?i:https?)://([^/?#]+[^#]*)(?:#.*)?")
IDENTIFIER = re.compile(r"[0-9a-f]{16}")
OF_LANDMARKS = ["mAP@100", "mP@10"]
USAGES = ("Public", "Private", "Ignored")
# the lists lie next to the images, or as in the authors' addresses
FOLDERS = ("", "metadata", "ground_truth")


def _images(source: Path, file: Path) -> Iterator[ImageFile]:
    """Yield the images of a list with web address, landmark and box per image."""
    for line in read_lines(file):
        if len(line.cells) not in (2, 6):
            raise line.wrong(
                f"{len(line.cells)} columns, expected the image, its landmark and the four of a box"
            )
        yield ImageFile(_path(line, source), str(line.integer(1, "landmark")))


def _path(line: ListLine, source: Path) -> Path:
    """Return an image's path: `wget --force-directories` stores a file under its address."""
    name = line.cells[0]
    if "://" not in name:
        return line.path(source, name)
    found = ADDRESS.fullmatch(name)
    if found is None:
        raise line.wrong(f"{name[:200]!r} is no address of an image on the web")
    as_listed = line.path(source / "images", found[1])
    decoded = unquote(found[1])
    if decoded.isprintable() and (path := line.path(source / "images", decoded)).is_file():
        return path
    return as_listed


DATASETS["landmarks-clean"] = Dataset(  # Gordo et al. 2016, of the Landmarks of Babenko et al. 2014
    Split("train", "annotation_clean_train.txt", _images, (Count(42_410),)),
    Split("validation", "annotation_clean_val.txt", _images, (Count(6_382),)),
    folders=("annotations_landmarks", "annotations", ""),
)


def _clean(source: Path, file: Path) -> Iterator[ImageFile]:
    """Yield the cleaned training set from a list with one landmark per line and spaces between
    images.
    """
    for line in read_table(file, ("landmark_id", "images"), ","):
        landmark = str(line.integer(0, "landmark"))
        for name in line.cells[1].split():
            yield _google(line, source / "train", name, landmark)


def _unlabelled(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("id",), ","):
        yield _google(line, source / file.stem, line.cells[0])


def _queries(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in _solutions(file):
        yield _google(line, source / "test", line.cells[0])


def _ground_truth(file: Path) -> dict[str, Any]:
    queries = []
    for line in _solutions(file):
        name, *positives = (
            _identifier(line, each) for each in (line.cells[0], *line.cells[1].split())
        )
        queries.append({"name": name, "part": line.cells[2], "positives": positives})
    return ground_truth(queries, "index", dataset="gldv2", figures=OF_LANDMARKS)


def _solutions(file: Path) -> Iterator[ListLine]:
    """Yield the lines of test images that count: most are ignored, since they show no landmark of
    the index.
    """
    for line in read_table(file, ("id", "images", "Usage"), ","):
        if line.cells[2] not in USAGES:
            raise line.wrong(f"usage {line.cells[2][:60]!r}, expected one of {', '.join(USAGES)}")
        if line.cells[2] != "Ignored":
            yield line


def _google(line: ListLine, folder: Path, name: str, landmark: str = "") -> ImageFile:
    """Return an image of a landmark; otherwise it is a class of its own, by the name that the
    ground truth uses.
    """
    return ImageFile(folder.joinpath(*_identifier(line, name)[:3], f"{name}.jpg"), landmark or name)


def _identifier(line: ListLine, name: str) -> str:
    if not IDENTIFIER.fullmatch(name):
        raise line.wrong(f"image {name[:60]!r}, expected 16 digits from 0 to f")
    return name


DATASETS["gldv2"] = Dataset(  # Weyand et al. 2020; the queries are those of ground truth 2.1
    Split("train", "train_clean.csv", _clean, (Count(1_580_470, 81_313),)),
    Split("index", "index.csv", _unlabelled, (Count(761_757, 761_757),)),
    Split("query", "retrieval_solution_v2.1.csv", _queries, truth=_ground_truth),
    folders=FOLDERS,
)


def _in_hierarchy(source: Path, file: Path) -> Iterator[ImageFile]:
    """Yield the cleaned images of landmarks that have a hierarchical label, with it as their
    coarser class.
    """
    columns = (
        "landmark_id",
        "category",
        "supercategory",
        "hierarchical_label",
        "natural_or_human_made",
    )
    listed = read_table(file.with_name("train_label_to_hierarchical.csv"), columns, ",")
    labels = {line.cells[0]: class_name(line.cells[3]) for line in listed}
    for image in _clean(source, file):
        label = labels.get(image.class_name)
        if label:
            yield image._replace(levels=(label,))


# Ramzi et al. 2023; counts: elias-ramzi/SupRank, config/dataset/gldv2_hier.yaml
DATASETS["h-gldv2"] = Dataset(
    Split("train", "train_clean.csv", _in_hierarchy, (Count(970_981, 46_593),)), folders=FOLDERS
)
