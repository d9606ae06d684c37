"""iNaturalist 2018 (Van Horn et al.) with the split of Smooth-AP (Brown et al. 2020), which ROADMAP uses too."""

from collections.abc import Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split, read_table
from distap.data.shards.image_files import ImageFile


def _images(source: Path, file: Path) -> Iterator[ImageFile]:
    for line in read_table(file, ("path",), heading=False):
        path = line.path(source, line.cells[0])
        parts = line.cells[0].split("/")
        if len(parts) != 4 or not parts[2].isdigit():
            raise line.wrong(f"{line.cells[0][:200]!r}: expected train_val2018/SUPER-CATEGORY/NUMBER/IMAGE.jpg")
        yield ImageFile(path, parts[2], parts[1])


def _lists(name: str) -> tuple[str, str]:
    return f"Inat_dataset_splits/{name}", name


DATASET = Dataset(
    "iNaturalist 2018, split of Smooth-AP",
    "https://github.com/visipedia/inat_comp/tree/master/2018 (images) and "
    "https://github.com/Andrew-Brown1/Smooth_AP (Inat_dataset_splits)",
    (
        Split("train", _lists("Inaturalist_train_set1.txt"), _images, (Count(325_846, 5_690),)),
        Split("test", _lists("Inaturalist_test_set1.txt"), _images, (Count(136_093, 2_452),)),
    ),
)
