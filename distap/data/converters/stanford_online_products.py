"""Stanford Online Products (Song et al. 2016), as its archive unpacks."""

from collections.abc import Callable, Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import list_file, read_table
from distap.data.shards.sources import ImageFile

COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def _images(name: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        for line in read_table(list_file(source, name), COLUMNS):
            path = line.path(source, line.cells[3])
            line.integer(2, "super class")
            # Super-classes have numbers in the list and names as folders: bicycle_final.
            yield ImageFile(path, str(line.integer(1, "class")), line.cells[3].split("/")[0].removesuffix("_final"))

    return images


DATASET = Dataset(
    "Stanford Online Products",
    "https://cvgl.stanford.edu/projects/lifted_struct",
    (
        Split("train", _images("Ebay_train.txt"), (Count(59_551, 11_318),)),
        Split("test", _images("Ebay_test.txt"), (Count(60_502, 11_316),)),
    ),
)
