"""Converters of Landmarks-clean, Google Landmarks v2 and its hierarchical labels."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from distap.data.converters.dataset import (
    DATASETS,
    Count,
    Dataset,
    Images,
    Split,
    Truth,
    ground_truth,
    read_table,
)
from distap.data.labels import class_name
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine, read_lines

ADDRESS = re.compile(r"(?i:https?)://([^/?#]+[^#]*)(?:#.*)?")
IDENTIFIER = re.compile(r"[0-9a-f]{16}")
OF_LANDMARKS = ["mAP@100", "mP@10"]
USAGES = ("Public", "Private", "Ignored")
# the lists lie next to the images, or as in the authors' addresses
FOLDERS = ("", "metadata", "ground_truth")


def _images(source: Path, file: Path) -> Images:
    """Yield the images of a list with web address, landmark and box per image."""
    for line in read_lines(file):
        if len(line.cells) not in (2, 6):
            raise line.wrong(
                f"{len(line.cells)} columns, expected the image, its landmark and the four of a box"
            )
        yield ImageFile(_path(line, source), str(line.integer(1, "landmark")))


def _path(line: ListLine, source: Path) -> Path:
    """Return an image's path: `wget --force-directories` stores a file under its address."""
    name = line[0]
    if "://" not in name:
        return line.path(source, name)
    address = ADDRESS.fullmatch(name)
    if address is None:
        raise line.wrong(f"{name[:200]!r} is no address of an image on the web")
    listed = line.path(source / "images", address[1])
    decoded = unquote(address[1])
    path = line.path(source / "images", decoded) if decoded.isprintable() else listed
    return path if path.is_file() else listed


DATASETS["landmarks-clean"] = Dataset(  # Gordo et al. 2016, of the Landmarks of Babenko et al. 2014
    Split("train", "annotation_clean_train.txt", _images, (Count(42_410),)),
    Split("validation", "annotation_clean_val.txt", _images, (Count(6_382),)),
    folders=("annotations_landmarks", "annotations", ""),
)


def _clean(source: Path, file: Path) -> Images:
    """Yield the cleaned training set: a landmark per line, and spaces between images."""
    for line in read_table(file, ("landmark_id", "images"), ","):
        landmark = str(line.integer(0, "landmark"))
        for name in line[1].split():
            yield _google(line, source / "train", name, landmark)


def _unlabelled(source: Path, file: Path) -> Images:
    for line in read_table(file, ("id",), ","):
        yield _google(line, source / file.stem, line[0])


def _queries(source: Path, file: Path) -> Images:
    for line in _solutions(file):
        yield _google(line, source / "test", line[0])


def _ground_truth(file: Path) -> Truth:
    queries = []
    for line in _solutions(file):
        name, *positives = (_identifier(line, name) for name in (line[0], *line[1].split()))
        queries.append({"name": name, "part": line[2], "positives": positives})
    return ground_truth("gldv2", OF_LANDMARKS, queries, gallery="index")


def _solutions(file: Path) -> Iterator[ListLine]:
    """Yield the lines of test images that show a landmark of the index; most show none."""
    for line in read_table(file, ("id", "images", "Usage"), ","):
        if line[2] not in USAGES:
            raise line.wrong(f"usage {line[2][:60]!r}, expected one of {', '.join(USAGES)}")
        if line[2] != "Ignored":
            yield line


def _google(line: ListLine, folder: Path, name: str, landmark: str = "") -> ImageFile:
    """Return an image of a landmark; without one, it is a class of its own, called by its name."""
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


def _in_hierarchy(source: Path, file: Path) -> Images:
    """Yield the cleaned images of landmarks with a hierarchical label, their coarser class."""
    columns = (
        "landmark_id",
        "category",
        "supercategory",
        "hierarchical_label",
        "natural_or_human_made",
    )
    listed = read_table(file.with_name("train_label_to_hierarchical.csv"), columns, ",")
    labels = {line[0]: class_name(line[3]) for line in listed}
    for image in _clean(source, file):
        label = labels.get(image.class_name)
        if label:
            yield image._replace(levels=(label,))


# Ramzi et al. 2023; counts: elias-ramzi/SupRank, config/dataset/gldv2_hier.yaml
DATASETS["h-gldv2"] = Dataset(
    Split("train", "train_clean.csv", _in_hierarchy, (Count(970_981, 46_593),)), folders=FOLDERS
)
