"""Converters of faces: VGGFace2 and IJB-C.

Packing cuts the faces out by their bounding boxes.
"""

from collections import defaultdict
from collections.abc import Iterator
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
    read_table,
)
from distap.data.images.boxes import Box
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine

# width and height of what is cut out, in those of the bounding box (Cao et al. 2018)
EXTENDED = 1.3
FEWEST_INSTANCES = 5  # of an identity of IJB-C, as in Brown et al. 2020
SIGHTING = (
    "SUBJECT_ID",
    "FILENAME",
    "SIGHTING_ID",
    "FACE_X",
    "FACE_Y",
    "FACE_WIDTH",
    "FACE_HEIGHT",
)


def _extended(line: ListLine, first: int) -> Box:
    """Return the extended box of four cells: left, top, width and height."""
    cells = line.cells[first : first + 4]
    left, top, width, height = map(float, cells)
    if not (0 < width < 1e6 and 0 < height < 1e6 and abs(left) + abs(top) < 1e6):
        raise line.wrong(f"expected left, top, width and height, not {cells}")
    margin = (EXTENDED - 1) / 2
    return (
        round(left - margin * width),
        round(top - margin * height),
        round(left + (1 + margin) * width),
        round(top + (1 + margin) * height),
    )


def _vgg_faces(source: Path, file: Path) -> Images:
    for line in read_table(file, ("NAME_ID", "X", "Y", "W", "H"), ","):
        path = line.path(source / file.stem.removeprefix("loose_bb_"), f"{line[0]}.jpg")
        yield ImageFile(path, line[0].split("/")[0], box=_extended(line, 1))


DATASETS["vggface2"] = Dataset(  # Cao et al. 2018
    Split("train", "loose_bb_train.csv", _vgg_faces, (Count(3_141_890, 8_631),)),
    Split("test", "loose_bb_test.csv", _vgg_faces, (Count(169_396, 500),)),
    folders=("bb_landmark", "meta/bb_landmark", "meta", ""),
)


class _Face(NamedTuple):
    line: ListLine
    subject: str
    instance: str  # an image, or the frames of a video in which somebody is seen
    name: str


def _faces(file: Path) -> Iterator[_Face]:
    """Yield the faces of known identities that are seen in enough images and videos."""
    faces_of = defaultdict[str, list[_Face]](list)
    for line in read_table(file, SIGHTING, ","):
        subject, name, sighting = line.cells[:3]
        if subject.lower() not in ("", "nan"):
            face = f"{name} {subject}"
            instance = f"{subject}/{sighting}" if name.startswith("frames/") else face
            faces_of[subject].append(_Face(line, subject, instance, face))
    for faces in faces_of.values():
        if len({face.instance for face in faces}) >= FEWEST_INSTANCES:
            yield from faces


def _ijb_c(source: Path, file: Path) -> Images:
    for face in _faces(file):
        path = face.line.path(source / "images", face.line[1])
        yield ImageFile(path, face.name, box=_extended(face.line, 3))


def _same_subject(file: Path) -> Truth:
    """Return the truth of IJB-C: each instance is a query for the others of its subject."""
    faces_of = defaultdict[str, list[str]](list)
    instances_of = defaultdict[str, dict[str, None]](dict)
    for face in _faces(file):
        instances_of[face.subject][face.instance] = None
        if face.instance != face.name:
            faces_of[face.instance].append(face.name)
    queries = [
        {"name": name, "positives": [other for other in instances if other != name]}
        for instances in instances_of.values()
        for name in instances
    ]
    return ground_truth("ijb-c", ["mAP", "R@1"], queries, "test", "test", instances=faces_of)


# Maze et al. 2018, with the protocol of retrieval of Brown et al. 2020
DATASETS["ijb-c"] = Dataset(
    Split("test", "ijbc_metadata.csv", _ijb_c, truth=_same_subject),
    folders=("protocols", "protocols/archive", ""),
)
