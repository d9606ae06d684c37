"""PKU VehicleID (Liu et al. 2016): its training list and its three test lists, small, medium and large."""

from collections.abc import Callable, Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import list_file, read_table
from distap.data.shards.sources import ImageFile


def _images(name: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        for line in read_table(list_file(source, f"train_test_split/{name}"), ("image", "vehicle"), heading=False):
            number = line.integer(0, "image")
            yield ImageFile(source / "image" / f"{number:07d}.jpg", str(line.integer(1, "vehicle")))

    return images


DATASET = Dataset(
    "PKU VehicleID",
    "https://www.pkuml.org/resources/pku-vehicleid.html",
    (
        # The paper's numbers, and those of the files as they were corrected afterwards, as their README tells.
        Split("train", _images("train_list.txt"), (Count(113_346, 13_164), Count(110_178, 13_134))),
        Split("test_small", _images("test_list_800.txt"), (Count(classes=800),)),
        Split("test_medium", _images("test_list_1600.txt"), (Count(classes=1_600),)),
        Split("test_large", _images("test_list_2400.txt"), (Count(classes=2_400),)),
    ),
)
