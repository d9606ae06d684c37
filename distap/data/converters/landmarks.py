"""Landmarks-clean (Gordo et al. 2016): the Landmarks images (Babenko et al. 2014) that their lists keep.

The lists give the address of an image on the web, its landmark and the box around it; whoever has the images got them
from those addresses, or from the authors. An address is looked for where `wget --force-directories` puts it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import Line, list_file, read_lines
from distap.data.shards.sources import ImageFile


def _images(name: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        places = (f"annotations_landmarks/{name}", f"annotations/{name}", name)
        for line in read_lines(list_file(source, *places)):
            if len(line.cells) not in (2, 6):
                raise line.wrong(f"{len(line.cells)} columns, expected the image, its landmark and the four of a box")
            for corner in line.cells[2:]:
                if not corner.lstrip("-").replace(".", "", 1).isdigit():
                    raise line.wrong(f"{corner[:60]!r} is no number of a box")
            yield ImageFile(_path(line, source), str(line.integer(1, "landmark")))

    return images


def _path(line: Line, source: Path) -> Path:
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


DATASET = Dataset(
    "Landmarks-clean",
    "http://download.europe.naverlabs.com/Computer-Vision-CodeandModels/ (annotations_landmarks)",
    (
        Split("train", _images("annotation_clean_train.txt"), (Count(42_410),)),
        Split("validation", _images("annotation_clean_val.txt"), (Count(6_382),)),
    ),
)
