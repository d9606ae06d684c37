"""Converters of metric learning: SOP, CUB, Cars, iNaturalist, VehicleID, In-shop and DyML."""

from functools import partial
from pathlib import Path

from distap.data.converters.dataset import (
    DATASETS,
    Count,
    Dataset,
    Images,
    Split,
    read_objects,
    read_table,
)
from distap.data.labels import Levels
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine, read_lines
from distap.errors import DistapError


def _stanford(source: Path, file: Path) -> Images:
    for line in read_table(file, ("image_id", "class_id", "super_class_id", "path")):
        path = line.path(source, line[3])
        # Super-classes are numbers in the list, but the folders have their names: bicycle_final.
        super_class = line[3].split("/")[0].removesuffix("_final")
        yield ImageFile(path, str(line.integer(1, "class")), (super_class,))


DATASETS["sop"] = Dataset(  # Song et al. 2016
    Split("train", "Ebay_train.txt", _stanford, (Count(59_551, 11_318),)),
    Split("test", "Ebay_test.txt", _stanford, (Count(60_502, 11_316),)),
)


def _cub(source: Path, file: Path, classes: range) -> Images:
    names = _by_number(source / "classes.txt", "class_name")
    labels = _by_number(source / "image_class_labels.txt", "class_id")
    for line in read_table(file, ("image_id", "image_name"), heading=0):
        label = int(labels[line.integer(0, "image")])
        if label in classes:
            yield ImageFile(line.path(source / "images", line[1]), names[label])


def _by_number(file: Path, column: str) -> dict[int, str]:
    return {
        line.integer(0, "number"): line[1] for line in read_table(file, ("id", column), heading=0)
    }


# Wah et al. 2011; as usual in metric learning, the first hundred classes train and the others test.
DATASETS["cub"] = Dataset(
    Split("train", "images.txt", partial(_cub, classes=range(1, 101)), (Count(5_864, 100),)),
    Split("test", "images.txt", partial(_cub, classes=range(101, 201)), (Count(5_924, 100),)),
)


def _cars(source: Path, file: Path, classes: range) -> Images:
    """Yield the images of these classes from the list in MATLAB's format.

    Errors name places in it as lines.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DistapError(
            "package.missing", f"{file}: reading a MATLAB file needs scipy: pip install scipy"
        ) from error
    try:
        listed = loadmat(file, squeeze_me=True, variable_names=["annotations"])["annotations"]
        rows = list(zip(listed["relative_im_path"], listed["class"], strict=True))
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise DistapError(
            "data.wrong_list",
            f"{file}: no MATLAB file with annotations (relative_im_path, class): {error}",
        ) from error
    for place, row in enumerate(rows, 1):
        line = ListLine(file, place, list(map(str, row)))
        label = line.integer(1, "class")
        if not 1 <= label <= 196:
            raise line.wrong(f"class {label} is none of 1 to 196")
        if label in classes:
            yield ImageFile(line.path(source, line[0]), str(label))


# Krause et al. 2013; split by classes like CUB, not by the list's own column `test`
DATASETS["cars-196"] = Dataset(
    Split("train", "cars_annos.mat", partial(_cars, classes=range(1, 99)), (Count(8_054, 98),)),
    Split("test", "cars_annos.mat", partial(_cars, classes=range(99, 197)), (Count(8_131, 98),)),
)


TAXA = ["kingdom", "phylum", "class", "order", "family", "genus"]


def _tree(file: Path) -> dict[str, Levels]:
    """Return genus to kingdom by the number of a species.

    Each is named with all above it, since a plant and an animal share a genus.
    """
    return {
        str(number): tuple("/".join(map(str, taxa[:end])) for end in range(len(TAXA), 0, -1))
        for number, *taxa in read_objects(file, "id", *TAXA)
    }


def _inaturalist(source: Path, file: Path) -> Images:
    tree = _tree(source / "categories.json") if (source / "categories.json").exists() else None
    for line in read_table(file, ("path",), heading=0):
        path = line.path(source, line[0])
        folders = line[0].split("/")
        if len(folders) != 4 or not folders[2].isdigit():
            raise line.wrong(
                f"{line[0][:200]!r}: expected train_val2018/SUPER-CATEGORY/NUMBER/IMAGE.jpg"
            )
        _, category, species, _ = folders
        yield ImageFile(path, species, (category,) if tree is None else tree[species])


# Van Horn et al. 2018, with the split of Brown et al. 2020, also of ROADMAP
DATASETS["inaturalist"] = Dataset(
    Split("train", "Inaturalist_train_set1.txt", _inaturalist, (Count(325_846, 5_690),)),
    Split("test", "Inaturalist_test_set1.txt", _inaturalist, (Count(136_093, 2_452),)),
    folders=("Inat_dataset_splits", ""),
)


def _vehicle_id(source: Path, file: Path) -> Images:
    for line in read_table(file, ("image", "vehicle"), heading=0):
        path = source / "image" / f"{line.integer(0, 'image'):07d}.jpg"
        yield ImageFile(path, str(line.integer(1, "vehicle")))


DATASETS["vehicleid"] = Dataset(  # Liu et al. 2016
    # The counts of the paper, and those of the files, which were corrected afterwards as their
    # README tells.
    Split("train", "train_list.txt", _vehicle_id, (Count(113_346, 13_164), Count(110_178, 13_134))),
    Split("test_small", "test_list_800.txt", _vehicle_id, (Count(classes=800),)),
    Split("test_medium", "test_list_1600.txt", _vehicle_id, (Count(classes=1_600),)),
    Split("test_large", "test_list_2400.txt", _vehicle_id, (Count(classes=2_400),)),
    folders=("train_test_split",),
)

IN_SHOP_COLUMNS = ("image_name", "item_id", "evaluation_status")
IN_SHOP_COUNTS = {
    "train": Count(25_882, 3_997),
    "query": Count(14_218, 3_985),
    "gallery": Count(12_612, 3_985),
}


def _in_shop(source: Path, file: Path, status: str) -> Images:
    """Yield the images of a status, from a list that starts with a line of counts."""
    folder = source / "Img" if (source / "Img").is_dir() else source
    groups: dict[str, str] = {}
    for line in read_table(file, IN_SHOP_COLUMNS, heading=2):
        name, item, its_status = line.cells
        if its_status not in IN_SHOP_COUNTS:
            raise line.wrong(f"expected an image, an item and one of {', '.join(IN_SHOP_COUNTS)}")
        path = line.path(folder, name)
        if its_status == status:
            # The category is the two folders under img, such as MEN/Denim. An item has one.
            yield ImageFile(path, item, (groups.setdefault(item, "/".join(name.split("/")[1:3])),))


DATASETS["inshop"] = Dataset(  # Liu et al. 2016
    *(
        Split(status, "list_eval_partition.txt", partial(_in_shop, status=status), (count,))
        for status, count in IN_SHOP_COUNTS.items()
    ),
    folders=("Eval", ""),
)


def _dyml(source: Path, file: Path) -> Images:
    """Yield the images of a list, whose first row follows the heading on its line.

    That line is, for example, `fname,labels0.jpg,17`.
    """
    is_whole = file.stem == "label"
    heading = "fname,coarse_id,middle_id,fine_id" if is_whole else "fname,labels"
    folder = file.with_name("imgs" if is_whole else file.stem)
    # Test classes have numbers of their own.
    prefix = "" if file.parent.name == "train" else f"{file.parent.name}/"
    for line in read_lines(file, ","):
        text = ",".join(line.cells)
        if line.number == 1 and not text.startswith(heading):
            raise line.wrong(f"expected the heading {heading!r}")
        row = text.removeprefix(heading)
        if row:
            cells = row.split(",")
            if len(cells) != heading.count(",") + 1:
                raise line.wrong(f"{len(cells)} columns, expected {heading!r}")
            yield ImageFile(line.path(folder, cells[0]), prefix + cells[-1], tuple(cells[-2:0:-1]))


def _dynamic(classes: int, **tests: str) -> Dataset:
    train = Split("train", "train/label.csv", _dyml, (Count(classes=classes),))
    return Dataset(train, *(Split(name, file, _dyml) for name, file in tests.items()))


# Sun et al. 2021; the numbers of classes are those of elias-ramzi/HAPPIER, happier/config/dataset.
OF_LEVELS = {
    f"{level}-{split}": f"bmk_{level}/{split}.csv"
    for level in ("fine", "middle", "coarse")
    for split in ("query", "gallery")
}
DATASETS |= {
    "dyml-animal": _dynamic(495, **OF_LEVELS),
    "dyml-vehicle": _dynamic(39_491, **OF_LEVELS),
    "dyml-product": _dynamic(1_639, test="mini-bmk_all_in_one/label.csv"),
}
