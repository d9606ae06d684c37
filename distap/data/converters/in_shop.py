"""In-shop Clothes Retrieval of DeepFashion (Liu et al. 2016): training images, queries and their gallery."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, ListLine, Split, read_lines
from distap.data.shards.image_files import ImageFile

LISTS = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
COLUMNS = ["image_name", "item_id", "evaluation_status"]
COUNTS = {"train": Count(25_882, 3_997), "query": Count(14_218, 3_985), "gallery": Count(12_612, 3_985)}


def _images(source: Path, file: Path, status: str) -> Iterator[ImageFile]:
    folder = source / "Img" if (source / "Img").is_dir() else source
    groups: dict[str, str] = {}
    for line in _lines(file):
        name, item, found = line.cells
        path = line.path(folder, name)
        if found == status:
            # The category is the two folders under img, such as MEN/Denim. An item has one.
            yield ImageFile(path, item, groups.setdefault(item, "/".join(name.split("/")[1:3])))


def _lines(file: Path) -> Iterator[ListLine]:
    """Yield the lines below the heading, which is one line with the number of images and one with the columns."""
    lines = read_lines(file)
    count, columns = next(lines, ListLine(file, 1, [""])), next(lines, ListLine(file, 2, [""]))
    listed = count.integer(0, "number of images")
    if len(count.cells) != 1 or list(columns.cells) != COLUMNS:
        raise columns.wrong(f"expected the heading {' '.join(COLUMNS)!r} below the number of images")
    last, found = columns, 0
    for last in lines:
        found += 1
        if len(last.cells) != len(COLUMNS) or last.cells[2] not in COUNTS:
            raise last.wrong(f"expected an image, an item and one of {', '.join(COUNTS)}")
        yield last
    if found != listed:
        raise last.wrong(f"the list ends after {found:,} images, but its first line says {listed:,}")


DATASET = Dataset(
    "In-shop Clothes Retrieval (DeepFashion)",
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    tuple(Split(name, LISTS, partial(_images, status=name), (count,)) for name, count in COUNTS.items()),
)
