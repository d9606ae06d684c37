"""Use map-style data sets of torch, torchvision and Hugging Face in place of shards."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import image_file
from distap.data.labels import class_name_at
from distap.data.shards.image_folders import Skipped
from distap.data.shards.parallel import Track, untracked
from distap.data.shards.tables import LEVELS
from distap.errors import DistapError
from distap.registry import place_of
from distap.storage.locations import Source, parse_source
from distap.storage.names import composed

LOOKED_AT = 8  # images that are read twice, and that stand for all of them in the state of a run
# of columns of Hugging Face
LABEL_DTYPES = ("int", "uint", "float", "string", "large_string", "bool")
LABELS = ("targets", "labels")  # attributes in which data sets keep the labels of all items
NEEDED = "expected items (image, label), or dicts with image and label"


@dataclass(frozen=True, eq=False)
class DatasetRows:
    """N labelled images, each presented to `ImageSet` as a file of its own; safe to copy into
    loader workers.
    """

    name: str  # of the data set, for messages
    images: Any  # by number: what `image_file` takes
    numbers: Sequence[int]  # (N,) of the images
    classes: Sequence[str]  # (N,) name of each image's class
    keys: Sequence[str]  # (N,)
    # (N,) names of the coarser classes that hold each image's class, finer first
    levels: Sequence[tuple[str, ...]]
    left_out: tuple[Skipped, ...] = ()  # images without a class
    meter: Counter[str] = field(default_factory=Counter)  # as of a `Storage`

    def where(self, row: int) -> str:
        return f"{self.name}[{self.numbers[row]}]"

    def read(self, row: str, offset: int = 0, size: int = 0) -> bytes:
        """Return the bytes of an image's file; `ImageSet` passes the row number as the name of a
        shard.

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
            raise DistapError(f"{where}: {error}") from error
        self.meter["read_bytes"] += len(data)
        return data

    def digests(self) -> list[str]:
        """Return (N,) SHA-256 of a few images, "" for the others.

        Raises:
            DistapError: an image differs between two reads, or none can be read.
        """
        found = [""] * len(self.keys)
        failure = None
        few = sorted({k * (len(found) - 1) // (LOOKED_AT - 1) for k in range(LOOKED_AT)})
        for row in few:
            try:
                first = self.read(str(row))
                second = self.read(str(row))
            except DamagedImageError as error:
                failure = error
                continue
            if first != second:
                remedy = (
                    "give the data set without its random transform, since distap augments images"
                    " itself"
                )
                raise DistapError(
                    f"{self.where(row)} is another image each time it is read: {remedy}"
                )
            found[row] = hashlib.sha256(first).hexdigest()
        if failure is not None and not any(found):
            raise DistapError(
                f"{self.name}: none of {len(few)} images could be read: {failure}"
            ) from failure
        return found


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
    from torch.utils.data import Subset  # here, since paths need no torch

    base = data
    chosen = None
    while isinstance(base, Subset):
        chosen = (
            list(base.indices) if chosen is None else [base.indices[number] for number in chosen]
        )
        base = base.dataset
    name = type(base).__name__
    if not (hasattr(base, "__len__") and hasattr(base, "__getitem__")) or isinstance(base, dict):
        raise DistapError(
            f"{name} is no map-style data set, which has a length and items by their number"
        )
    numbers: Sequence[int] = (
        range(len(base)) if chosen is None else [int(number) for number in chosen]
    )
    return Source(
        f"given:{place_of(base)}",
        name,
        None,
        kind="given",
        rows=_rows_of(base, name, numbers, track),
    )


def rows_behind(source: Source) -> DatasetRows | None:
    """Return the images of a source that is a data set in Python or of Hugging Face; None for other
    sources.
    """
    if source.kind == "hf":
        return _of_hub(source.base)
    if source.kind == "given" and source.rows is None:
        raise DistapError(
            f"{source}: an object in Python was here; distap.train(..., data=...) takes it again"
        )
    return cast("DatasetRows | None", source.rows)


def _rows_of(base: Any, name: str, numbers: Sequence[int], track: Track = untracked) -> DatasetRows:
    from torchvision.datasets import DatasetFolder
    from torchvision.datasets.folder import default_loader

    if not len(numbers):
        raise DistapError(f"{name}: the data set is empty")
    if len(set(numbers)) < len(numbers):
        raise DistapError(f"{name}: the subset has an image twice, which would be its own positive")
    keys = {number: str(number) for number in numbers}
    images: Any = _Images(base, name)
    # labels by number, as images are, and the names of classes; of the class and of each coarser
    # level
    columns: Any
    if hasattr(base, "features") and hasattr(base, "cast_column"):
        images, *columns = _of_columns(base, name)
    elif (
        isinstance(base, DatasetFolder)
        and base.loader is default_loader
        and base.transforms is None
    ):
        images, labels = zip(*base.samples, strict=True)
        keys = {
            number: os.path.relpath(images[number], base.root).replace(os.sep, "/")
            for number in numbers
        }
        columns = [(labels, base.classes)]
    else:
        columns = [(images.labels(numbers, track), getattr(base, "classes", None))]
    found, *above = (_class_names(numbers, labels, known, name) for labels, known in columns)
    kept = [number for number in numbers if found[number]]
    if not kept:
        raise DistapError(f"{name}: none of its {len(numbers)} images has a class")
    others = tuple(
        Skipped(f"{name}[{number}]", "images without a class")
        for number in numbers
        if not found[number]
    )
    levels = [tuple(column[one] for column in above) for one in kept]
    return DatasetRows(
        name,
        images,
        kept,
        [found[one] for one in kept],
        [keys[one] for one in kept],
        levels,
        others,
    )


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
        """Return an image and its label; raise a DamagedImageError if the data set's own code
        fails.
        """
        try:
            item = self.dataset[number]
        except Exception as error:  # it may raise anything
            raise DamagedImageError("decode_error", f"{self.name}[{number}]: {error!r}") from error
        if isinstance(item, dict) and {"image", "label"} <= item.keys():
            return item["image"], item["label"]
        if isinstance(item, tuple | list) and len(item) > 1:
            return item[0], item[1]
        has = f", with {', '.join(map(str, item))}" if isinstance(item, dict) else ""
        raise DistapError(f"{self.name}[{number}] is a {type(item).__name__}{has}; {NEEDED}")

    def labels(self, numbers: Sequence[int], track: Track) -> Any:
        """Return labels by number: those of an attribute that agrees with some items, or those of
        all items.
        """
        for attribute in LABELS:
            values: Any = getattr(self.dataset, attribute, None)
            values = values.tolist() if hasattr(values, "tolist") else values
            if isinstance(values, list | tuple) and len(values) == len(self.dataset):
                few = (numbers[0], numbers[len(numbers) // 2], numbers[-1])
                if all(self._agrees(number, values[number]) for number in few):
                    return values
        found = {}
        told = f"reading the labels of {self.name}, whose items agree with no attribute `targets`"
        for number in track(numbers, told, len(numbers)):
            try:
                found[number] = self.item(number)[1]
            except DamagedImageError as error:
                raise DistapError(
                    f"{error}; with an attribute `targets` of labels it would be left out"
                ) from error
        return found

    def _agrees(self, number: int, label: Any) -> bool:
        try:
            return class_name_at("", self.item(number)[1]) == class_name_at("", label)
        except DistapError:  # reading all items says what is wrong
            return False
        except DamagedImageError:  # reading for a batch tells of it
            return True


def _class_names(numbers: Sequence[int], labels: Any, known: Any, name: str) -> dict[int, str]:
    """Return class names by number; `known` lists them by label if there is one for each and they
    differ.
    """
    found = {number: class_name_at(f"{name}[{number}]", labels[number]) for number in numbers}
    names = list(known) if isinstance(known, list | tuple) else []
    fits = len({name for name in names if isinstance(name, str)}) == len(names)
    fits = fits and all(
        label.isdecimal() and int(label) < len(names) for label in {*found.values()} - {""}
    )
    return {
        number: composed(names[int(label)]) if fits and label else label
        for number, label in found.items()
    }


def _of_columns(dataset: Any, name: str) -> tuple[Any, ...]:
    """Return images, and for the label and each coarser level the values and their names, of a
    Hugging Face set.
    """
    import datasets

    if dataset.format["type"] == "custom":
        raise DistapError(
            f"{name} has a transform; distap augments images itself: give it without, as"
            " with_format(None) does"
        )
    features = dataset.features
    pictures = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    levels = [column for column in LEVELS if column in features]
    others = {column: kind for column, kind in features.items() if column not in levels}
    classes = [column for column, kind in others.items() if isinstance(kind, datasets.ClassLabel)]
    plain = [
        column
        for column, kind in others.items()
        if getattr(kind, "dtype", "").startswith(LABEL_DTYPES)
    ]
    labels = (
        [column for column in classes or plain if column in ("label", "labels")] or classes or plain
    )
    if len(pictures) != 1 or len(labels) != 1:
        found = ", ".join(f"{column}: {kind}" for column, kind in features.items())
        raise DistapError(
            f"{name} has the columns {found}; expected one Image, and one ClassLabel, number or"
            " text, or of several one that is called label (rename_column and remove_columns help)"
        )
    items = dataset.with_format(None).select_columns(pictures + labels)
    items = items.rename_columns({pictures[0]: "image", labels[0]: "label"})
    # the files as they are stored
    images = _Images(items.cast_column("image", datasets.Image(decode=False)), name)
    table = dataset.select_columns(labels + levels).with_format("arrow")[:]
    named = (
        (table[column].to_pylist(), getattr(features[column], "names", None))
        for column in labels + levels
    )
    return images, *named


@lru_cache(maxsize=8)
def _of_hub(text: str) -> DatasetRows:
    """Load NAME or NAME#SPLIT: a folder that `save_to_disk` wrote, or a set that
    `datasets.load_dataset` finds.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DistapError(f"hf:{text}: datasets is missing: pip install 'distap[hf]'") from error
    name, _, split = text.partition("#")
    is_saved = any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name)
    except Exception as error:  # the library and what it reads raise their own
        raise DistapError(
            f"hf:{text}: neither a folder that save_to_disk wrote nor a data set that datasets can"
            f" load: {error}"
        ) from error
    if isinstance(loaded, dict):
        split = next(iter(loaded)) if len(loaded) == 1 and not split else split
        if split not in loaded:
            raise DistapError(
                f"hf:{text}: it has the splits {', '.join(loaded)}; expected hf:{name}#SPLIT"
            )
        loaded = loaded[split]
    elif split:
        raise DistapError(f"hf:{text}: it has no splits; expected hf:{name}")
    return _rows_of(loaded, f"hf:{text}", range(len(loaded)))
