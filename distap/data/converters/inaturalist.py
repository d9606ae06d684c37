"""iNaturalist 2018 (Van Horn et al.) with the split of Smooth-AP (Brown et al. 2020), which ROADMAP uses too."""

from collections.abc import Callable, Iterator
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.lists import list_file, read_table
from distap.data.shards.sources import ImageFile


def _images(name: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        for line in read_table(list_file(source, f"Inat_dataset_splits/{name}", name), ("path",), heading=False):
            path = line.path(source, line.cells[0])
            parts = line.cells[0].split("/")
            if len(parts) != 4 or not parts[2].isdigit():
                raise line.wrong(f"{line.cells[0][:200]!r}: expected train_val2018/SUPER-CATEGORY/NUMBER/IMAGE.jpg")
            yield ImageFile(path, parts[2], parts[1])

    return images


DATASET = Dataset(
    "iNaturalist 2018, split of Smooth-AP",
    "https://github.com/visipedia/inat_comp/tree/master/2018 (images) and "
    "https://github.com/Andrew-Brown1/Smooth_AP (Inat_dataset_splits)",
    (
        Split("train", _images("Inaturalist_train_set1.txt"), (Count(325_846, 5_690),)),
        Split("test", _images("Inaturalist_test_set1.txt"), (Count(136_093, 2_452),)),
    ),
)
