"""The index of a data set, place, class and size of every image: `index.npz` of shards, or made of
single files.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from distap.data.labels import nesting, table_of_levels
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
from distap.errors import DistapError
from distap.randomness import permutation
from distap.storage.columns import Buffer, columns_file, read_columns
from distap.storage.files import Storage
from distap.storage.locations import Source, parse_source, safe_name
from distap.storage.names import composed
from distap.storage.remotes import MissingFileError
from distap.storage.texts import as_line, is_line

INDEX_VERSION = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")
THREADS = 16  # remote shards whose sizes are asked for at once


@dataclass(frozen=True)
class Index:
    """N samples in S shards, with K classes."""

    shard: NDArray[np.int32]  # (N,) number of the sample's shard
    offset: NDArray[np.int64]  # (N,) first byte of the image within its shard
    size: NDArray[np.int64]  # (N,) bytes of the image
    crc32: NDArray[np.uint32]  # (N,) of the image's bytes; 0 is not checked
    label: NDArray[np.int64]  # (N,) class number, 0 .. K-1
    width: NDArray[np.int32]  # (N,) pixels
    height: NDArray[np.int32]  # (N,) pixels
    key: NDArray[np.str_]  # (N,) name of the sample in its shard
    # (N,) of the file that was packed, within the folder of the images; "" is unknown
    path: NDArray[np.str_]
    shard_name: NDArray[np.str_]  # (S,) file name
    shard_size: NDArray[np.int64]  # (S,) bytes
    shard_sha256: NDArray[np.str_]  # (S,) hexadecimal
    class_name: NDArray[np.str_]  # (K,)
    # (K, L - 1) names of the coarser classes that hold each, finer first; "" for none
    class_levels: NDArray[np.str_]
    left_out: tuple[Skipped, ...] = ()  # files of a folder of images that are not in it, and why

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all rows, which identifies the data set in the state of a training."""
        digest = hashlib.sha256()
        for name in COLUMNS:
            if name != "path":  # it says where images came from, and not what they are
                # With types and lengths: bytes alone could be cut into other columns and give the
                # same hash.
                column = np.ascontiguousarray(getattr(self, name))
                digest.update(f"{name} {column.dtype.str} {len(column)} ".encode())
                digest.update(column.view(np.uint8).data if column.size else b"")
        return digest.hexdigest()

    @cached_property
    def names(self) -> NDArray[np.str_]:
        """Return (N,) names of the images: their paths if all are known, otherwise their keys."""
        return self.path if self.path.all() else self.key

    @cached_property
    def classes(self) -> Classes:
        """Return the samples by class, for the plan of batches."""
        return Classes(self.label, self.class_levels)

    def of_classes(self, begin: float, end: float) -> "Index":
        """Return the images of a part of the classes, which are in a random order that depends on
        their number.
        """
        count = len(self.class_name)
        chosen = np.sort(permutation(count, 0)[round(begin * count) : round(end * count)])
        kept = np.isin(self.label, chosen)
        # Columns of samples are those without an underscore. All shards stay, since samples point
        # to them by number.
        columns = {name: getattr(self, name)[kept] for name in COLUMNS if "_" not in name}
        columns |= {
            name: getattr(self, name)[chosen] for name in COLUMNS if name.startswith("class_")
        }
        return replace(self, **columns | {"label": np.searchsorted(chosen, columns["label"])})

    def save(self, source: Source | Path | str) -> None:
        """Write the index atomically next to the shards of its source."""
        source = parse_source(source)
        columns = {column: getattr(self, column) for column in COLUMNS}
        Storage(source.base).write(
            source.index_name, columns_file(version=np.array(INDEX_VERSION), **columns)
        )


def statistics(index: Index) -> dict[str, Any]:
    """Count a data set's images, classes, bytes and left-out files, ready for JSON."""
    sizes = index.classes.sizes
    return {
        "images": len(index),
        "classes": len(sizes),
        "classes_of_one_image": int((sizes == 1).sum()),  # which is never a query
        "images_a_class_min": int(sizes.min()),
        "images_a_class_median": float(np.median(sizes)),
        "images_a_class_max": int(sizes.max()),
        "bytes": int(index.size.sum()),  # of the images; the shards hold headers and labels besides
        "left_out": len(index.left_out),
    }


# The numpy types of the columns by name, as read_columns takes them. NDArray[T] is an alias whose
# argument is T since numpy 2.5, and was ndarray[shape, dtype[T]].
TYPES = {
    name: get_args(hint)[-1] for name, hint in get_type_hints(Index).items() if name != "left_out"
}
COLUMNS = {name: np.dtype((get_args(of) or (of,))[0]).name for name, of in TYPES.items()}
COLUMNS["class_levels"] = "table"


def parse_index(data: Buffer, where: str) -> Index:
    """Parse the contents of index file `where`; check every row, so that none leads outside the
    data set.

    The columns are views of `data`.
    """
    remedy = "make it anew with `distap data index`"
    try:
        version = int(read_columns(data, {"version": "scalar"})["version"])
        if version != INDEX_VERSION:
            raise DistapError(
                f"{where}: version {version} of the index, expected {INDEX_VERSION}; {remedy}"
            )
        columns: dict[str, Any] = read_columns(data, COLUMNS)
    except ValueError as error:
        raise DistapError(f"{where}: not a readable index: {error}; {remedy}") from error
    index = Index(**columns)
    for problem in _problems(index):
        raise DistapError(f"{where}: not a sound index: {problem}; {remedy}")
    for name in index.shard_name.tolist():
        safe_name(name, where)
    return with_composed_names(index, where)


def with_composed_names(index: Index, where: str) -> Index:
    """Return an index whose classes have composed names; those whose names are the same then are
    one class.

    Raises a DistapError if such classes lie within different coarser ones.
    """
    names = [composed(name) for name in index.class_name.tolist()]
    levels = [tuple(map(composed, above)) for above in index.class_levels.tolist()]
    if names == index.class_name.tolist() and levels == list(
        map(tuple, index.class_levels.tolist())
    ):
        return index
    known = nesting((where, name, above) for name, above in zip(names, levels, strict=True))
    number = {name: place for place, name in enumerate(known)}
    return replace(
        index,
        label=np.array([number[name] for name in names])[index.label],
        class_name=np.array(list(known)),
        class_levels=table_of_levels(known.values()),
    )


def _problems(index: Index) -> Iterator[str]:
    """Yield the impossible values of an index whose columns have the right types."""
    for group in ("", "shard", "class"):
        lengths = {
            name: len(getattr(index, name)) for name in COLUMNS if name.rpartition("_")[0] == group
        }
        if len(set(lengths.values())) > 1:
            yield "columns of unequal length: " + ", ".join(
                f"{name} {length}" for name, length in lengths.items()
            )
            return
    shards = len(index.shard_name)
    classes = len(index.class_name)
    if (index.shard_size < 0).any():
        yield "a shard of negative size"
    if len(set(index.shard_name.tolist())) < shards:
        yield "two shards of one name"
    if len(set(index.class_name.tolist())) < classes:
        yield "two classes of one name, which an evaluation could not tell apart"
    if not all(_SHA256.fullmatch(digest) for digest in index.shard_sha256.tolist()):
        yield "shard_sha256 holds something that is no SHA-256"
    known = (index.shard >= 0) & (index.shard < shards)
    ends = np.zeros(len(index), dtype=np.int64)
    ends[known] = index.shard_size[index.shard[known]]
    # offset + size could overflow, so the difference is compared instead.
    beyond = (index.offset < 0) | (index.size > ends) | (index.offset > ends - index.size)
    for wrong, problem in (
        (~known, f"shard is none of 0 .. {shards - 1}"),
        ((index.label < 0) | (index.label >= classes), f"label is none of 0 .. {classes - 1}"),
        (index.size < 1, "size is below 1"),
        (beyond, "image reaches beyond its shard"),
        ((index.width < 1) | (index.height < 1), "width or height is below 1"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            yield f"sample {row} ({str(index.key[row])!r}): its {problem}"


def load_index(source: Source | Path | str, compare: bool = True) -> Index:
    """Read and check a data set's index; with `compare`, also that its shards exist with the same
    sizes.
    """
    source = parse_source(source)
    index = _index_of_whole(source, compare)
    index = index.of_classes(*source.part) if source.is_part else index
    if len(index) == 0:
        raise DistapError(f"{source}: the data set is empty")
    return index


def _index_of_whole(source: Source, compare: bool) -> Index:
    if source.kind == "described":
        raise DistapError(
            f"{source}: these are descriptors, and no images; only training and evaluation take"
            " them"
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
            f"{source}: a file, and no folder of shards; `distap data pack` packs the images of a"
            " list"
        )
    try:
        index = parse_index(Storage(source.base).mapped(source.index_name), source.index)
    except MissingFileError as error:
        if not source.scheme and not Path(source.base).is_dir():
            raise DistapError(
                f"{source}: no such data set: there is no folder {source.base}"
            ) from error
        if (
            not source.scheme
            and source.pattern is None
            and not any(Path(source.base).glob("*.tar"))
        ):
            remedy = (
                f"a folder with a sub-folder a class is imagefolder:{source}, or is packed by"
                " `distap data pack`"
            )
            raise DistapError(f"{source}: no .tar file is in it; {remedy}") from error
        remedy = (
            f"`distap data index {quote(str(source))}` makes one from its shards, if they are there"
        )
        raise DistapError(f"{source}: no {source.index_name} in it; {remedy}") from error
    if compare:
        _require_shards(source, index)
    return index


def index_of_folder(source: Source, labelled: bool = True) -> Index:
    """Make an index of images in any folder; or in a folder for each class, in those of coarser
    classes if any.
    """
    folder = Path(source.base)
    if not folder.is_dir():
        raise DistapError(f"{source}: no such folder")
    listing = list_images(folder, "levels", labelled=labelled)
    sound, broken = look_at_all(listing.images)
    of_name = {image.path.relative_to(folder).as_posix(): (image, look) for image, look in sound}
    names, unfit = ([name for name in of_name if is_line(name) is fits] for fits in (True, False))
    images = [of_name[name][0] for name in names]
    sizes = [of_name[name][1].st_size for name in names]
    # The times of change stand for digests of what the files hold, which only reading them would
    # tell.
    times = "" if labelled else [str(of_name[name][1].st_mtime_ns) for name in names]
    index = index_of_files(source, names, names, images, sizes, times)
    told = [
        (os.path.relpath(name, folder), reason) for name, reason in (*listing.left_out, *broken)
    ]
    told += [(name, "names that are no line of text in UTF-8") for name in unfit]
    return replace(index, left_out=tuple(Skipped(as_line(name), reason) for name, reason in told))


def index_of_files(
    source: Source,
    names: Sequence[Any],
    keys: Sequence[str],
    images: Sequence[ImageFile],
    sizes: Any,
    digests: Any,
) -> Index:
    """Make an index that treats each image file as a shard; unknown sizes are 0 and unknown digests
    "".

    Either all images have a class or none.
    """
    for key in keys:
        if not is_line(key):
            raise DistapError(
                f"{source}: {key!r}: rename it without tabs, line breaks and bytes that are no"
                " UTF-8"
            )
    levels = levels_of_each_class(images) if any(image.class_name for image in images) else {"": ()}
    classes = sort_classes(levels)
    numbers = {name: number for number, name in enumerate(classes)}
    count = len(names)
    zeros = np.zeros(len(names), dtype=np.int32)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.int64), count).copy()
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
        shard_sha256=np.broadcast_to(np.asarray(digests), count).copy(),
        class_name=np.array(classes),
        class_levels=table_of_levels([levels[name] for name in classes]),
    )


def _require_shards(source: Source, index: Index) -> None:
    storage = Storage(source.base)
    names = index.shard_name.tolist()
    first = storage.size(names[0])  # alone, so that a wrong setting is tried once
    with ThreadPoolExecutor(THREADS) as pool:
        found = [first, *(pool.map if source.scheme else map)(storage.size, names[1:])]
    for name, size, now in zip(names, index.shard_size.tolist(), found, strict=True):
        if now != size:
            remedy = (
                "fetch or pack it again, or, if it was replaced on purpose, index it by `distap"
                " data index`"
            )
            raise DistapError(
                f"{storage.where(name)}: {now} bytes, but {size} when it was indexed; {remedy}"
            )
