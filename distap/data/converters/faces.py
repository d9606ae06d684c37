"""Converters of faces: VGGFace2 and IJB-C, whose faces are cut out by their bounding boxes when
they are packed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distap.data.converters.dataset import DATASETS, Count, Dataset, Split, read_table
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
    left, top, width, height = map(float, line.cells[first : first + 4])
    if not (0 < width < 1e6 and 0 < height < 1e6 and abs(left) + abs(top) < 1e6):
        raise line.wrong(
            f"expected left, top, width and height, not {line.cells[first : first + 4]}"
        )
    more = (EXTENDED - 1) / 2
    corners = (
        left - more * width,
        top - more * height,
        left + (1 + more) * width,
        top + (1 + more) * height,
    )
    return tuple(map(round, corners))  # type: ignore[return-value]


def _vgg_faces(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("NAME_ID", "X", "Y", "W", "H"), ","):
        name = line.cells[0]
        path = line.path(source / file.stem.removeprefix("loose_bb_"), f"{name}.jpg")
        yield ImageFile(path, name.split("/")[0], box=_extended(line, 1))


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
    found = defaultdict[str, list[_Face]](list)
    for line in read_table(file, SIGHTING, ","):
        subject, name, sighting = line.cells[:3]
        if subject.lower() not in ("", "nan"):
            face = f"{name} {subject}"
            instance = f"{subject}/{sighting}" if name.startswith("frames/") else face
            found[subject].append(_Face(line, subject, instance, face))
    for own in found.values():
        if len({face.instance for face in own}) >= FEWEST_INSTANCES:
            yield from own


def _ijb_c(source: Path, file: Path) -> Iterator[ImageFile]:
    for face in _faces(file):
        yield ImageFile(
            face.line.path(source / "images", face.line.cells[1]),
            face.name,
            box=_extended(face.line, 3),
        )


def _same_subject(file: Path) -> dict[str, Any]:
    """Return the truth of IJB-C: every instance is a query, for which the others of its subject are
    right.
    """
    instances = defaultdict[str, list[str]](list)
    subjects = defaultdict[str, dict[str, None]](dict)
    for face in _faces(file):
        subjects[face.subject][face.instance] = None
        if face.instance != face.name:
            instances[face.instance].append(face.name)
    queries = [
        {"name": name, "positives": [other for other in own if other != name]}
        for own in subjects.values()
        for name in own
    ]
    about = {"dataset": "ijb-c", "figures": ["mAP", "R@1"], "query": ["test"], "gallery": ["test"]}
    return {**about, "instances": instances, "queries": queries}


# Maze et al. 2018, with the protocol of retrieval of Brown et al. 2020
DATASETS["ijb-c"] = Dataset(
    Split("test", "ijbc_metadata.csv", _ijb_c, truth=_same_subject),
    folders=("protocols", "protocols/archive", ""),
)
