"""CUB-200-2011 (Wah et al. 2011): the first hundred classes train and the others test, as in metric learning."""

from collections.abc import Callable, Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import list_file, read_table
from distap.data.shards.sources import ImageFile


def _images(classes: range) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        names = _by_number(list_file(source, "classes.txt"), "class_name")
        paths = list_file(source, "images.txt")
        labels = _by_number(list_file(source, "image_class_labels.txt"), "class_id")
        for line in read_table(paths, ("image_id", "image_name"), heading=False):
            label = labels.get(line.integer(0, "image"), "")
            if not label.isdigit() or int(label) not in names:
                raise line.wrong(f"image {line.cells[0]} has no class in image_class_labels.txt and classes.txt")
            if int(label) in classes:
                yield ImageFile(line.path(source / "images", line.cells[1]), names[int(label)])

    return images


def _by_number(file: Path, column: str) -> dict[int, str]:
    """The second column by the number in the first."""
    return {line.integer(0, "number"): line.cells[1] for line in read_table(file, ("id", column), heading=False)}


DATASET = Dataset(
    "CUB-200-2011",
    "https://www.vision.caltech.edu/datasets/cub_200_2011",
    (
        Split("train", _images(range(1, 101)), (Count(5_864, 100),)),
        Split("test", _images(range(101, 201)), (Count(5_924, 100),)),
    ),
)
