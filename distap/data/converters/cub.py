"""CUB-200-2011 (Wah et al. 2011): the first hundred classes train and the others test, as in metric learning."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split, find_list, read_table
from distap.data.shards.image_files import ImageFile


def _by_number(file: Path, column: str) -> dict[int, str]:
    return {line.integer(0, "number"): line.cells[1] for line in read_table(file, ("id", column), heading=False)}


def _images(source: Path, file: Path, classes: range) -> Iterator[ImageFile]:
    names = _by_number(find_list(source, "classes.txt"), "class_name")
    labels = _by_number(find_list(source, "image_class_labels.txt"), "class_id")
    for line in read_table(file, ("image_id", "image_name"), heading=False):
        label = labels.get(line.integer(0, "image"), "")
        if not label.isdigit() or int(label) not in names:
            raise line.wrong(f"image {line.cells[0]} has no class in image_class_labels.txt and classes.txt")
        if int(label) in classes:
            yield ImageFile(line.path(source / "images", line.cells[1]), names[int(label)])


DATASET = Dataset(
    "CUB-200-2011",
    "https://www.vision.caltech.edu/datasets/cub_200_2011",
    (
        Split("train", ("images.txt",), partial(_images, classes=range(1, 101)), (Count(5_864, 100),)),
        Split("test", ("images.txt",), partial(_images, classes=range(101, 201)), (Count(5_924, 100),)),
    ),
)
