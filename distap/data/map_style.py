"""Use map-style data sets of torch, torchvision and Hugging Face in place of shards."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, repeat
from pathlib import Path
from typing import Any, cast

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import image_file
from distap.data.labels import Levels, class_name_at
from distap.data.shards.image_folders import Skipped
from distap.data.shards.parallel import Track, untracked
from distap.data.shards.tables import LEVELS
from distap.errors import DistapError
from distap.registry import place_of
from distap.storage.locations import Source, parse_source
from distap.storage.names import composed

LOOKED_AT = 8  # images that are read twice, and that stand for all in the state of a run
# beginnings of the types of Hugging Face's columns that may be labels
LABEL_DTYPES = ("int", "uint", "float", "string", "large_string", "bool")
LABELS = ("targets", "labels")  # attributes in which data sets keep the labels of all items


@dataclass(frozen=True, eq=False)
class DatasetRows:
    """N labelled images, which `ImageSet` reads as shards of one image each.

    It is safe to copy into loader workers.
    """

    name: str  # of the data set, for messages
    images: Any  # by number: what `image_file` takes
    numbers: Sequence[int]  # (N,) of the images
    classes: Sequence[str]  # (N,) name of each image's class
    keys: Sequence[str]  # (N,)
    levels: Sequence[Levels]  # (N,) of each image's class
    left_out: tuple[Skipped, ...] = ()  # images without a class
    meter: Counter[str] = field(default_factory=Counter)  # as of a `Storage`

    def where(self, row: int) -> str:
        return f"{self.name}[{self.numbers[row]}]"

    def read(self, row: str, offset: int = 0, size: int = 0) -> bytes:
        """Return the bytes of an image's file.

        The name of a shard, which `ImageSet` passes, is here the number of a row.

        Raises:
            DamagedImageError: the data set cannot give the image.
            DistapError: the data set gives something other than an image.
        """
        where = self.where(int(row))
        image = self.images[self.numbers[int(row)]]
        try:
            data = image_file(image)
        except DistapError as error:
            if isinstance(image, str | Path):  # a file that is gone or may not be read
                raise DamagedImageError("decode_error", f"{where}: {error}") from error
            raise DistapError(error.code, f"{where}: {error}") from error
        self.meter["read_bytes"] += len(data)
        return data

    def drained(self) -> Counter[str]:
        """Return what the meter has counted since the last call."""
        counts = self.meter.copy()
        self.meter.clear()
        return counts

    def digests(self) -> list[str]:
        """Return (N,) SHA-256 of a few images, "" for the others.

        Raises:
            DistapError: an image differs between two reads, or none can be read.
        """
        count = len(self.keys)
        digests = [""] * count
        failure = None
        rows = {place * (count - 1) // (LOOKED_AT - 1) for place in range(LOOKED_AT)}
        for row in sorted(rows):
            try:
                first = self.read(str(row))
                second = self.read(str(row))
            except DamagedImageError as error:
                failure = error
                continue
            if first != second:
                raise DistapError(
                    "data.random_images",
                    f"{self.where(row)} is another image each time it is read: give the data set"
                    " without its random transform, since distap augments images itself",
                )
            digests[row] = hashlib.sha256(first).hexdigest()
        if failure and not any(digests):
            raise DistapError(
                "data.unreadable",
                f"{self.name}: none of {len(rows)} images could be read: {failure}",
            ) from failure
        return digests


def source_of(data: Any, track: Track = untracked) -> Source:
    """Make a data set in Python a source of images, usable in place of a path or URL of shards.

    Args:
        data: a path or URL, which is parsed; a Hugging Face `datasets.Dataset` with one column of
            images and one of labels, and coarser classes in `level1` to `level9`; torchvision's
            ImageFolder, whose files are read as they are; or any map-style data set whose items are
            (image, label) or dicts of `image` and `label`. An image is a PIL image, a path, the
            bytes of a file, or uint8 pixels; a label is what `class_name` takes, and images without
            a class are left out. Labels are taken from the attribute `targets` or `labels` if it
            agrees with some items; otherwise all items are read once.
        track: shows the progress of reading all items.
    Raises:
        DistapError: it is none of these.
    """
    if isinstance(data, str | Path | Source):
        return parse_source(data)
    base, numbers = _without_subsets(data)
    name = type(base).__name__
    rows = _rows_of(base, name, numbers, track)
    return Source(f"given:{place_of(base)}", name, None, kind="given", rows=rows)


def _without_subsets(data: Any) -> tuple[Any, Sequence[int]]:
    """Return the data set behind subsets of it, and the numbers of the items that they choose."""
    from torch.utils.data import Subset  # here, since paths need no torch

    if isinstance(data, Subset):
        base, numbers = _without_subsets(data.dataset)
        return base, [numbers[index] for index in data.indices]
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, dict):
        raise DistapError(
            "data.unknown_type",
            f"{type(data).__name__} is no map-style data set, which has a length and items by their"
            " number",
        )
    return data, range(len(data))


def rows_behind(source: Source) -> DatasetRows | None:
    """Return the images of a data set in Python or of Hugging Face; None for other sources."""
    if source.kind == "hf":
        return _of_hub(source.base)
    if source.kind == "given" and source.rows is None:
        raise DistapError(
            "data.object_missing",
            f"{source}: an object in Python was here; distap.train(..., data=...) takes it again",
        )
    return cast("DatasetRows | None", source.rows)


def _rows_of(
    dataset: Any, name: str, numbers: Sequence[int], track: Track = untracked
) -> DatasetRows:
    """Return the images of these numbers, without those that have no class."""
    if not len(numbers):
        raise DistapError("data.empty", f"{name}: the data set is empty")
    if len(set(numbers)) < len(numbers):
        raise DistapError(
            "data.repeated_image",
            f"{name}: the subset has an image twice, which would be its own positive",
        )
    keys = list(map(str, numbers))
    images: Any = _Images(dataset, name)
    # Labels by number, as images are, and the names of classes: of the class and of each level.
    columns: Any
    if hasattr(dataset, "features") and hasattr(dataset, "cast_column"):
        images, *columns = _hub_columns(dataset, name)
    elif _lists_files(dataset):
        images, labels = zip(*dataset.samples, strict=True)
        paths = (os.path.relpath(images[number], dataset.root) for number in numbers)
        keys = [path.replace(os.sep, "/") for path in paths]
        columns = [(labels, dataset.classes)]
    else:
        columns = [(images.labels(numbers, track), getattr(dataset, "classes", None))]

    classes, *above = (
        _class_names(name, numbers, labels, class_names) for labels, class_names in columns
    )
    if not any(classes):
        raise DistapError(
            "data.no_classes", f"{name}: none of its {len(numbers)} images has a class"
        )
    levels: Iterable[Any] = zip(*above, strict=True) if above else repeat(())
    return DatasetRows(
        name,
        images,
        numbers=list(compress(numbers, classes)),
        classes=list(compress(classes, classes)),
        keys=list(compress(keys, classes)),
        levels=list(compress(levels, classes)),
        left_out=tuple(
            Skipped(f"{name}[{number}]", "images without a class")
            for number, class_name in zip(numbers, classes, strict=True)
            if not class_name
        ),
    )


def _lists_files(dataset: Any) -> bool:
    """Return whether a data set is a folder of torchvision, whose files can be read as they are."""
    from torchvision.datasets import DatasetFolder
    from torchvision.datasets.folder import default_loader

    is_folder = isinstance(dataset, DatasetFolder) and dataset.loader is default_loader
    return is_folder and dataset.transforms is None


@dataclass(frozen=True)
class _Images:
    """Images of a map-style data set, taken from its items."""

    dataset: Any
    name: str

    def __getitem__(self, number: int) -> Any:
        image = self.item(number)[0]
        if image is None:
            raise DamagedImageError("missing_field", f"{self.name}[{number}] has no image")
        # as Hugging Face stores a file
        if isinstance(image, dict) and {"bytes", "path"} <= image.keys():
            return image["path"] if image["bytes"] is None else image["bytes"]
        return image

    def item(self, number: int) -> tuple[Any, Any]:
        """Return an image and its label.

        Raises a DamagedImageError if the data set's own code fails.
        """
        try:
            item = self.dataset[number]
        except Exception as error:  # it may raise anything
            raise DamagedImageError("decode_error", f"{self.name}[{number}]: {error!r}") from error
        if isinstance(item, dict) and {"image", "label"} <= item.keys():
            return item["image"], item["label"]
        if isinstance(item, tuple | list) and len(item) > 1:
            return item[0], item[1]
        keys = f", with {', '.join(map(str, item))}" if isinstance(item, dict) else ""
        raise DistapError(
            "data.wrong_item",
            f"{self.name}[{number}] is a {type(item).__name__}{keys}; expected items (image,"
            " label), or dicts with image and label",
        )

    def labels(self, numbers: Sequence[int], track: Track) -> Any:
        """Return labels by number, from an attribute that agrees with some items, or from all."""
        for attribute in LABELS:
            values: Any = getattr(self.dataset, attribute, None)
            values = values.tolist() if hasattr(values, "tolist") else values
            if isinstance(values, list | tuple) and len(values) == len(self.dataset):
                samples = (numbers[0], numbers[len(numbers) // 2], numbers[-1])
                if all(self._agrees(number, values[number]) for number in samples):
                    return values
        description = (
            f"reading the labels of {self.name}, whose items agree with no attribute `targets`"
        )
        try:
            return {
                number: self.item(number)[1] for number in track(numbers, description, len(numbers))
            }
        except DamagedImageError as error:
            raise DistapError(
                "data.unreadable",
                f"{error}; with an attribute `targets` of labels it would be left out",
            ) from error

    def _agrees(self, number: int, label: Any) -> bool:
        try:
            return class_name_at("", self.item(number)[1]) == class_name_at("", label)
        except DistapError:  # reading all items raises it with its place
            return False
        except DamagedImageError:  # reading for a batch reports it
            return True


def _class_names(name: str, numbers: Sequence[int], labels: Any, class_names: Any) -> list[str]:
    """Return the class names of items: their labels, or `class_names` by label.

    The latter count if they are different texts, one for each label.
    """
    texts = [class_name_at(f"{name}[{number}]", labels[number]) for number in numbers]
    if not isinstance(class_names, list | tuple):
        return texts
    if len({text for text in class_names if isinstance(text, str)}) < len(class_names):
        return texts
    if not all(text.isdecimal() and int(text) < len(class_names) for text in {*texts} - {""}):
        return texts
    return [composed(class_names[int(text)]) if text else "" for text in texts]


def _hub_columns(dataset: Any, name: str) -> tuple[Any, ...]:
    """Return the images of a Hugging Face set, then values and their names by column.

    The columns are those of the label and of each coarser level.
    """
    import datasets

    if dataset.format["type"] == "custom":
        raise DistapError(
            "data.random_images",
            f"{name} has a transform; distap augments images itself: give it without, as"
            " with_format(None) does",
        )
    features = dataset.features
    pictures = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = _label_columns(features)
    if len(pictures) != 1 or len(labels) != 1:
        columns = ", ".join(f"{column}: {kind}" for column, kind in features.items())
        raise DistapError(
            "data.wrong_columns",
            f"{name} has the columns {columns}; expected one Image, and one ClassLabel, number or"
            " text, or of several one that is called label (rename_column and remove_columns help)",
        )
    items = dataset.with_format(None).select_columns(pictures + labels)
    items = items.rename_columns({pictures[0]: "image", labels[0]: "label"})
    # the files as they are stored
    images = _Images(items.cast_column("image", datasets.Image(decode=False)), name)
    labels += [column for column in LEVELS if column in features]
    table = dataset.select_columns(labels).with_format("arrow")[:]
    return images, *(
        (table[column].to_pylist(), getattr(features[column], "names", None)) for column in labels
    )


def _label_columns(features: Any) -> list[str]:
    """Return the columns that may be the label: of classes, else of numbers or texts."""
    kinds = {column: kind for column, kind in features.items() if column not in LEVELS}
    columns = [column for column, kind in kinds.items() if hasattr(kind, "names")] or [
        column
        for column, kind in kinds.items()
        if getattr(kind, "dtype", "").startswith(LABEL_DTYPES)
    ]
    return [column for column in columns if column in ("label", "labels")] or columns


@lru_cache(maxsize=8)
def _of_hub(text: str) -> DatasetRows:
    """Load NAME or NAME#SPLIT: a folder of `save_to_disk`, or a set for `datasets.load_dataset`."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DistapError(
            "package.missing", f"hf:{text}: datasets is missing: pip install 'distap[hf]'"
        ) from error
    name, _, split = text.partition("#")
    is_saved = any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name)
    except Exception as error:  # the library and what it reads raise their own
        raise DistapError(
            "data.missing",
            f"hf:{text}: neither a folder that save_to_disk wrote nor a data set that datasets can"
            f" load: {error}",
        ) from error
    if isinstance(loaded, dict):
        split = next(iter(loaded)) if len(loaded) == 1 and not split else split
        if split not in loaded:
            raise DistapError(
                "data.unknown_split",
                f"hf:{text}: it has the splits {', '.join(loaded)}; expected hf:{name}#SPLIT",
            )
        loaded = loaded[split]
    elif split:
        raise DistapError("data.unknown_split", f"hf:{text}: it has no splits; expected hf:{name}")
    return _rows_of(loaded, f"hf:{text}", range(len(loaded)))
