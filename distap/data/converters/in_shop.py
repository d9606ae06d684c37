"""In-shop Clothes Retrieval of DeepFashion (Liu et al. 2016): training images, queries and their gallery."""

from collections.abc import Callable, Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import Line, list_file, read_lines
from distap.data.shards.sources import ImageFile

COLUMNS = ["image_name", "item_id", "evaluation_status"]
STATUSES = ("train", "query", "gallery")


def _images(status: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        folder = source / "Img" if (source / "Img").is_dir() else source
        groups: dict[str, str] = {}
        for line in _lines(list_file(source, "Eval/list_eval_partition.txt", "list_eval_partition.txt")):
            name, item, what = line.cells
            path = line.path(folder, name)
            if what == status:
                # The category, as MEN/Denim: the two folders under img. An item has one.
                yield ImageFile(path, item, groups.setdefault(item, "/".join(name.split("/")[1:3])))

    return images


def _lines(file: Path) -> Iterator[Line]:
    """Lines below the two of the heading: the number of images, and the columns."""
    lines = read_lines(file)
    count, columns = next(lines, Line(file, 1, [""])), next(lines, Line(file, 2, [""]))
    if len(count.cells) != 1:
        raise count.wrong("expected the number of images")
    if list(columns.cells) != COLUMNS:
        raise columns.wrong(f"expected the heading {' '.join(COLUMNS)!r}")
    listed = count.integer(0, "number of images")
    last, found = columns, 0
    for last in lines:
        found += 1
        if len(last.cells) != len(COLUMNS) or last.cells[2] not in STATUSES:
            raise last.wrong(f"expected an image, an item and one of {', '.join(STATUSES)}")
        yield last
    if found != listed:
        raise last.wrong(f"the list ends after {found:,} images, but its first line says {listed:,}")


DATASET = Dataset(
    "In-shop Clothes Retrieval (DeepFashion)",
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    (
        Split("train", _images("train"), (Count(25_882, 3_997),)),
        Split("query", _images("query"), (Count(14_218, 3_985),)),
        Split("gallery", _images("gallery"), (Count(12_612, 3_985),)),
    ),
)
