"""The index of a data set: place, class and size of every image.

It is `index.npz` next to shards, or made from a folder of images.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.labels import Texts, nesting, table_of_levels
from distap.data.map_style import rows_behind
from distap.data.plan import Classes
from distap.data.shards.image_files import (
    ImageFile,
    levels_of_each_class,
    list_images,
    look_at_all,
    sort_classes,
)
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index_rules import COLUMNS, FURTHER, problems_of_index
from distap.errors import DistapError
from distap.randomness import Numbers, permutation
from distap.storage.columns import Buffer, columns_file, read_columns
from distap.storage.files import Storage
from distap.storage.locations import Source, parse_source, safe_name
from distap.storage.names import composed
from distap.storage.remotes import MissingFileError
from distap.storage.texts import as_line, is_line

DataSet = Source | Path | str  # as `parse_source` takes it

INDEX_VERSION = 5
THREADS = 16  # remote shards whose sizes are requested at once


class Scaling(NamedTuple):
    """How images were scaled down before they were packed."""

    shorter_side: int  # pixels, of images that had more
    jpeg_quality: int  # of these images, 1 to 100

    def __str__(self) -> str:
        return f"scaled to a shorter side of {self[0]} pixels at most, JPEG quality {self[1]}"


@dataclass(frozen=True)
class Index:
    """N samples in S shards, with K classes."""

    shard: NDArray[np.int32]  # (N,) number of the sample's shard
    offset: Numbers  # (N,) first byte of the image within its shard
    size: Numbers  # (N,) bytes of the image
    crc32: NDArray[np.uint32]  # (N,) of the image's bytes; 0 is not checked
    label: Numbers  # (N,) class number, 0 .. K-1
    width: NDArray[np.int32]  # (N,) pixels
    height: NDArray[np.int32]  # (N,) pixels
    key: Texts  # (N,) name of the sample in its shard
    # (N,) of the file that was packed, within the folder of the images; "" is unknown
    path: Texts
    shard_name: Texts  # (S,) file name
    shard_size: Numbers  # (S,) bytes
    shard_sha256: Texts  # (S,) hexadecimal
    class_name: Texts  # (K,)
    # (K, L - 1) names of the coarser classes that hold each, finer first; "" for none
    class_levels: Texts
    left_out: tuple[Skipped, ...] = ()  # files of a folder of images that are not in it, and why
    scaling: Scaling | None = None  # None: images were packed byte for byte, as far as is known
    # columns of the list of images that say more of them, by name: (N,) texts, "" for none
    further: Mapping[str, Texts] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all rows, which identifies the data set in the state of a training."""
        digest = hashlib.sha256()
        for name in COLUMNS:
            if name != "path":  # which is where images came from, and not what they are
                # With types and lengths: the same bytes could make other columns.
                column = np.ascontiguousarray(getattr(self, name))
                digest.update(f"{name} {column.dtype.str} {len(column)} ".encode())
                digest.update(column.view(np.uint8).data if column.size else b"")
        return digest.hexdigest()

    @cached_property
    def names(self) -> Texts:
        """Return (N,) names of the images: their paths if all are known, otherwise their keys."""
        return self.path if self.path.all() else self.key

    @cached_property
    def classes(self) -> Classes:
        """Return the samples by class; those that are a file each are in no shards."""
        shards = self.shard if len(self.shard_name) < len(self) else None
        return Classes(self.label, self.class_levels, shards=shards)

    def of_classes(self, begin: float, end: float) -> "Index":
        """Return the images of a part of the classes, from share `begin` to share `end` of them.

        The classes are in a random order that depends on their number.
        """
        count = len(self.class_name)
        drawn = np.sort(permutation(count, 0)[round(begin * count) : round(end * count)])
        rows = np.isin(self.label, drawn)
        # Columns of samples are those without an underscore. All shards stay, since samples point
        # to them by number.
        columns = {name: getattr(self, name)[rows] for name in COLUMNS if "_" not in name}
        columns["label"] = np.searchsorted(drawn, columns["label"])
        return replace(
            self,
            **columns,
            further={name: texts[rows] for name, texts in self.further.items()},
            class_name=self.class_name[drawn],
            class_levels=self.class_levels[drawn],
        )

    def save(self, source: DataSet) -> None:
        """Write the index atomically next to the shards of its source."""
        source = parse_source(source)
        columns = {column: getattr(self, column) for column in COLUMNS}
        if self.scaling:
            columns["scaling"] = np.array(self.scaling)
        if self.further:
            columns[FURTHER] = np.array(list(self.further))
            columns |= zip(_further_columns(self.further), self.further.values(), strict=True)
        Storage(source.base).write(
            source.index_name, columns_file(version=np.array(INDEX_VERSION), **columns)
        )


def _further_columns(names: Collection[str]) -> list[str]:
    """Return the columns of a file that hold the further columns of these names."""
    return [f"{FURTHER}_{number}" for number in range(len(names))]


def parse_index(data: Buffer, where: str) -> Index:
    """Parse the contents of index file `where`.

    Every row is checked, so that none leads outside the data set. The columns are views of `data`.
    """
    remedy = "make it anew with `distap data index`"
    try:
        version = int(read_columns(data, {"version": "scalar"})["version"])
        if version != INDEX_VERSION:
            raise DistapError(
                "data.old_index",
                f"{where}: version {version} of the index, expected {INDEX_VERSION}; {remedy}",
            )
        optional = {"scaling": "int64", FURTHER: "str"}
        columns: dict[str, Any] = read_columns(data, COLUMNS | optional, optional)
        names = columns.pop(FURTHER, np.array([])).tolist()
        of_names = _further_columns(names)
        further = read_columns(data, dict.fromkeys(of_names, "str"))
        columns[FURTHER] = {
            name: further[column] for name, column in zip(names, of_names, strict=True)
        }
        if "scaling" in columns:
            columns["scaling"] = Scaling(*columns["scaling"].tolist())
        index = Index(**columns)
    except (TypeError, ValueError) as error:  # TypeError: `scaling` has not two numbers
        raise DistapError(
            "data.damaged_index", f"{where}: not a readable index: {error}; {remedy}"
        ) from error
    for problem in problems_of_index(index):
        raise DistapError("data.damaged_index", f"{where}: not a sound index: {problem}; {remedy}")
    for name in index.shard_name.tolist():
        safe_name(name, where)
    return with_composed_names(index, where)


def with_composed_names(index: Index, where: str) -> Index:
    """Return an index whose classes have composed names; classes with the same name are joined.

    Raises a DistapError if such classes lie within different coarser ones.
    """
    texts = index.class_name.tolist() + index.class_levels.ravel().tolist()
    if all(composed(text) == text for text in texts):
        return index
    names = [composed(name) for name in index.class_name.tolist()]
    levels = nesting(
        (where, name, tuple(map(composed, above)))
        for name, above in zip(names, index.class_levels.tolist(), strict=True)
    )
    number = {name: place for place, name in enumerate(levels)}
    return replace(
        index,
        label=np.array([number[name] for name in names])[index.label],
        class_name=np.array(list(levels)),
        class_levels=table_of_levels(levels.values()),
    )


def load_index(source: DataSet, compare: bool = True) -> Index:
    """Read and check a data set's index.

    With `compare`, check also that its shards exist with the same sizes.
    """
    source = parse_source(source)
    index = _index_of_whole(source, compare)
    index = index.of_classes(*source.part) if source.is_part else index
    if len(index) == 0:
        raise DistapError("data.empty", f"{source}: the data set is empty")
    return index


def _index_of_whole(source: Source, compare: bool) -> Index:
    """Read or make the index of a data set, whatever part of it is asked for."""
    if source.kind == "described":
        raise DistapError(
            "data.no_images",
            f"{source}: these are descriptors, and no images; only training and evaluation take"
            " them",
        )
    rows = rows_behind(source)
    if rows is not None:
        images = list(map(ImageFile, map(Path, rows.keys), rows.classes, rows.levels))
        index = index_of_files(source, range(len(images)), rows.keys, images, 0, rows.digests())
        return replace(index, left_out=rows.left_out)
    if source.kind == "imagefolder":
        return index_of_folder(source)
    if not source.scheme and Path(source.base).is_file():
        raise DistapError(
            "data.no_shards",
            f"{source}: a file, and no folder of shards; `distap data pack` packs the images of a"
            " list",
        )
    try:
        index = parse_index(Storage(source.base).mapped(source.index_name), source.index)
    except MissingFileError as error:
        raise _missing_index(source) from error
    if compare:
        _require_shards(source, index)
    return index


def _missing_index(source: Source) -> DistapError:
    folder = Path(source.base)
    if not source.scheme and not folder.is_dir():
        return DistapError(
            "data.missing", f"{source}: no such data set: there is no folder {source.base}"
        )
    if not source.scheme and source.pattern is None and not any(folder.glob("*.tar")):
        return DistapError(
            "data.no_shards",
            f"{source}: no .tar file is in it; a folder with a sub-folder a class is"
            f" imagefolder:{source}, or is packed by `distap data pack`",
        )
    return DistapError(
        "data.missing_index",
        f"{source}: no {source.index_name} in it; `distap data index {quote(str(source))}` makes"
        " one from its shards, if they are there",
    )


def index_of_folder(source: Source, labelled: bool = True) -> Index:
    """Make an index of the images in a folder.

    The classes are its innermost folders, within the coarser classes of the folders above; without
    `labelled` the images have none.
    """
    folder = Path(source.base)
    if not folder.is_dir():
        raise DistapError("data.missing", f"{source}: no such folder")
    listing = list_images(folder, "levels", labelled=labelled)
    sound, broken = look_at_all(listing.images)
    rows = [(image.path.relative_to(folder).as_posix(), image, look) for image, look in sound]
    unfit = [
        Skipped(str(image.path), "names that are no line of text in UTF-8")
        for name, image, _ in rows
        if not is_line(name)
    ]
    rows = [row for row in rows if is_line(row[0])]
    names = [name for name, _, _ in rows]
    # The times of change stand for digests, for which all files would have to be read.
    times = "" if labelled else [str(look.st_mtime_ns) for _, _, look in rows]
    index = index_of_files(
        source,
        names,
        keys=names,
        images=[image for _, image, _ in rows],
        sizes=[look.st_size for _, _, look in rows],
        digests=times,
    )
    left_out = (
        Skipped(as_line(os.path.relpath(name, folder)), reason)
        for name, reason in (*listing.left_out, *broken, *unfit)
    )
    return replace(index, left_out=tuple(left_out))


def index_of_list(source: Source) -> Index:
    """Make an index of the images of a list, which lie anywhere on this machine."""
    listing = list_images(Path(source.base))
    sound, broken = look_at_all(listing.images)
    images = [image for image, _ in sound]
    index = index_of_files(
        source,
        [str(image.path.absolute()).removeprefix("/") for image in images],
        keys=[listing.name_of(image) for image in images],
        images=images,
        sizes=[look.st_size for _, look in sound],
        # The times of change stand for digests, as in `index_of_folder`.
        digests=[str(look.st_mtime_ns) for _, look in sound],
    )
    columns = [dict(image.columns) for image in images]
    further = (
        {name: np.array([cells[name] for cells in columns], np.str_) for name in columns[0]}
        if columns
        else {}
    )
    return replace(index, left_out=(*listing.left_out, *broken), further=further)


def index_of_files(
    source: Source,
    names: Sequence[Any],
    keys: Sequence[str],
    images: Sequence[ImageFile],
    sizes: Any,
    digests: Any,
) -> Index:
    """Make an index that treats each image file as a shard.

    Unknown sizes are 0 and unknown digests "". Either all images have a class or none.
    """
    for key in keys:
        if not is_line(key):
            raise DistapError(
                "data.wrong_image_name",
                f"{source}: {key!r}: rename it without tabs, line breaks and bytes that are no"
                " UTF-8",
            )
    levels = levels_of_each_class(images) if any(image.class_name for image in images) else {"": ()}
    classes = sort_classes(levels)
    numbers = {name: number for number, name in enumerate(classes)}
    count = len(names)
    zeros = np.zeros(count, dtype=np.int32)
    size = np.full(count, sizes, dtype=np.int64)
    return Index(
        shard=np.arange(count, dtype=np.int32),
        offset=np.zeros(count, dtype=np.int64),
        size=size,
        crc32=np.zeros(count, dtype=np.uint32),
        label=np.array([numbers[image.class_name] for image in images], dtype=np.int64),
        width=zeros,
        height=zeros,
        key=np.array(keys),
        path=np.array(keys),
        shard_name=np.array(names, dtype=np.str_),
        shard_size=size,
        shard_sha256=np.full(count, digests),
        class_name=np.array(classes),
        class_levels=table_of_levels([levels[name] for name in classes]),
    )


def _require_shards(source: Source, index: Index) -> None:
    """Raise a DistapError if a shard is missing or of another size than in the index."""
    storage = Storage(source.base)
    first, *further = index.shard_name.tolist()
    sizes = [storage.size(first)]  # alone, so that a wrong setting is tried once
    with ThreadPoolExecutor(THREADS) as pool:
        sizes += (pool.map if source.scheme else map)(storage.size, further)
    for name, indexed, size in zip(
        (first, *further), index.shard_size.tolist(), sizes, strict=True
    ):
        if size != indexed:
            raise DistapError(
                "data.changed_shard",
                f"{storage.where(name)}: {size} bytes, but {indexed} when it was indexed; fetch or"
                " pack it again, or, if it was replaced on purpose, index it by `distap data"
                " index`",
            )
