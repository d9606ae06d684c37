"""Landmarks-clean (Gordo et al. 2016): the Landmarks images (Babenko et al. 2014) that its lists keep.

The lists give an image's web address, its landmark and the box around it. Whoever has the images got them from those
addresses, or from the authors. An address is looked for where `wget --force-directories` puts it.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from distap.data.converters.dataset import Count, Dataset, ListLine, Split, read_lines
from distap.data.shards.image_files import ImageFile


def _images(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_lines(file):
        if len(line.cells) not in (2, 6):
            raise line.wrong(f"{len(line.cells)} columns, expected the image, its landmark and the four of a box")
        for corner in line.cells[2:]:
            if not corner.lstrip("-").replace(".", "", 1).isdigit():
                raise line.wrong(f"{corner[:60]!r} is no number of a box")
        yield ImageFile(_path(line, source), str(line.integer(1, "landmark")))


def _path(line: ListLine, source: Path) -> Path:
    name = line.cells[0]
    if "://" not in name:
        return line.path(source, name)
    try:
        url = urlsplit(name)
    except ValueError as error:
        raise line.wrong(f"{name[:200]!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.netloc:
        raise line.wrong(f"{name[:200]!r} is no address of an image on the web")
    place = url.netloc + url.path + (f"?{url.query}" if url.query else "")
    as_listed = line.path(source / "images", place)
    if "%" not in place or not unquote(place).isprintable():
        return as_listed
    decoded = line.path(source / "images", unquote(place))
    return decoded if decoded.is_file() else as_listed


def _lists(name: str) -> tuple[str, ...]:
    return f"annotations_landmarks/{name}", f"annotations/{name}", name


DATASET = Dataset(
    "Landmarks-clean",
    "http://download.europe.naverlabs.com/Computer-Vision-CodeandModels/ (annotations_landmarks)",
    (
        Split("train", _lists("annotation_clean_train.txt"), _images, (Count(42_410),)),
        Split("validation", _lists("annotation_clean_val.txt"), _images, (Count(6_382),)),
    ),
)
