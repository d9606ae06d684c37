"""PKU VehicleID (Liu et al. 2016): its training list and its three test lists, small, medium and large."""

from collections.abc import Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split, read_table
from distap.data.shards.image_files import ImageFile


def _images(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("image", "vehicle"), heading=False):
        number = line.integer(0, "image")
        yield ImageFile(source / "image" / f"{number:07d}.jpg", str(line.integer(1, "vehicle")))


def _split(name: str, file: str, *published: Count) -> Split:
    return Split(name, (f"train_test_split/{file}.txt",), _images, published)


DATASET = Dataset(
    "PKU VehicleID",
    "https://www.pkuml.org/resources/pku-vehicleid.html",
    (
        # The counts of the paper, and those of the files, which were corrected afterwards as their README tells.
        _split("train", "train_list", Count(113_346, 13_164), Count(110_178, 13_134)),
        _split("test_small", "test_list_800", Count(classes=800)),
        _split("test_medium", "test_list_1600", Count(classes=1_600)),
        _split("test_large", "test_list_2400", Count(classes=2_400)),
    ),
)
