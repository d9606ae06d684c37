"""The index of a data set's shards, `index.npz`: place, class and size of every image."""

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes
from distap.data.shards.image_folders import Skipped
from distap.errors import DistapError
from distap.storage.columns import Buffer, read_columns
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, parse_source, safe_name
from distap.storage.remotes import RemoteSettings

INDEX_VERSION = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    path: NDArray[np.str_]  # (N,) of the file that was packed, within the folder of the images; "" is unknown
    shard_name: NDArray[np.str_]  # (S,) file name
    shard_size: NDArray[np.int64]  # (S,) bytes
    shard_sha256: NDArray[np.str_]  # (S,) hexadecimal
    class_name: NDArray[np.str_]  # (K,)
    class_levels: NDArray[np.str_]  # (K, L - 1) names of the coarser classes that hold each, finer first; "" for none
    left_out: tuple[Skipped, ...] = ()  # files of a folder of images that are not in it, and why

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all rows, which identifies the data set in the state of a training."""
        digest = hashlib.sha256()
        for name in COLUMNS:
            if name != "path":  # it says where images came from, and not what they are
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

    @property
    def shard_counts(self) -> NDArray[np.int64]:
        """Return (S,) the number of samples in each shard."""
        return np.bincount(self.shard, minlength=len(self.shard_name))

    def save(self, source: Source | Path | str, remote: RemoteSettings | None = None) -> None:
        """Write the index atomically to the place that its source defines."""
        storage, name = index_place(parse_source(source), remote)
        storage.write(name, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the contents of an index file."""
        buffer = io.BytesIO()
        columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        np.savez(buffer, version=np.array(INDEX_VERSION), **columns)
        return buffer.getvalue()


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


HINTS = {name: hint for name, hint in get_type_hints(Index).items() if name != "left_out"}
# The numpy types of the columns by name, as read_columns takes them. NDArray[T] is an alias whose argument is T since
# numpy 2.5, and was ndarray[shape, dtype[T]].
TYPES = {name: get_args(hint)[-1] for name, hint in HINTS.items()}
COLUMNS = {name: np.dtype((get_args(of) or (of,))[0]).name for name, of in TYPES.items()}
SHARD_COLUMNS, CLASS_COLUMNS = ([name for name in COLUMNS if name.startswith(of)] for of in ("shard_", "class_"))
SAMPLE_COLUMNS = [name for name in COLUMNS if name not in (*SHARD_COLUMNS, *CLASS_COLUMNS)]
COLUMNS["class_levels"] = "table"


def index_place(source: Source, remote: RemoteSettings | None) -> tuple[Storage, str]:
    """Return the storage that holds a data set's index, and the name of the index in this storage."""
    if source.kept_index is None:
        return storage_of(source.base, remote), source.index_name
    return storage_of(str(source.kept_index.parent)), source.kept_index.name


def parse_index(data: Buffer, where: str) -> Index:
    """Parse the contents of index file `where`; check every row, so that none leads outside the data set.

    The columns are views of `data`.
    """
    remedy = "make it anew with `distap data index`"
    try:
        version = int(read_columns(data, {"version": "scalar"})["version"])
        if version != INDEX_VERSION:
            raise DistapError(f"{where}: version {version} of the index, expected {INDEX_VERSION}; {remedy}")
        columns: dict[str, Any] = read_columns(data, COLUMNS)
    except ValueError as error:
        raise DistapError(f"{where}: not a readable index: {error}; {remedy}") from error
    index = Index(**columns)
    for problem in _problems(index):
        raise DistapError(f"{where}: not a sound index: {problem}; {remedy}")
    for name in index.shard_name.tolist():
        safe_name(name, where)
    return index


def _problems(index: Index) -> Iterator[str]:
    """Yield the impossible values of an index whose columns have the right types."""
    for names in (SAMPLE_COLUMNS, SHARD_COLUMNS, CLASS_COLUMNS):
        lengths = {name: len(getattr(index, name)) for name in names}
        if len(set(lengths.values())) > 1:
            yield "columns of unequal length: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
            return
    shards, classes = len(index.shard_name), len(index.class_name)
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
