"""Stanford Online Products (Song et al. 2016), as its archive unpacks."""

from collections.abc import Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split, read_table
from distap.data.shards.image_files import ImageFile


def _images(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("image_id", "class_id", "super_class_id", "path")):
        line.integer(2, "super class")
        path = line.path(source, line.cells[3])
        # Super-classes are numbers in the list, but the folders have their names: bicycle_final.
        yield ImageFile(path, str(line.integer(1, "class")), line.cells[3].split("/")[0].removesuffix("_final"))


DATASET = Dataset(
    "Stanford Online Products",
    "https://cvgl.stanford.edu/projects/lifted_struct",
    (
        Split("train", ("Ebay_train.txt",), _images, (Count(59_551, 11_318),)),
        Split("test", ("Ebay_test.txt",), _images, (Count(60_502, 11_316),)),
    ),
)
