"""The index beside a data set's shards: where each sample is, and what it is.

`index.npz` holds plain arrays, one row a sample. Its fingerprint, a hash of the rows, stands for the data set in
the state of a training. What is read is checked row by row: nothing in an index leads outside its data set.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.shards.columns import read_columns
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.locations import INDEX_FILE, Source, parse_source, safe_name
from distap.storage.reads import About, Storage, storage_of
from distap.storage.remotes import MissingFileError, RemoteSettings

__all__ = ["INDEX_FILE", "Index", "load_index"]

VERSION = 2  # version 1 had no class_group
AT_ONCE = 16  # shards of a remote that are looked at side by side
_SHA256 = re.compile(r"[0-9a-f]{64}")
COLUMNS = {
    "version": "scalar",
    "shard": "int32",
    "offset": "int64",
    "size": "int64",
    "crc32": "uint32",
    "label": "int64",
    "width": "int32",
    "height": "int32",
    "key": "U",
    "shard_name": "U",
    "shard_size": "int64",
    "shard_sha256": "U",
    "class_name": "U",
    "class_group": "U",
}
OF_SAMPLES = ("shard", "offset", "size", "crc32", "label", "width", "height", "key")
OF_SHARDS = ("shard_name", "shard_size", "shard_sha256")
OF_CLASSES = ("class_name", "class_group")


@dataclass(frozen=True)
class Index:
    """Samples and shards of a data set; N samples in S shards, K classes."""

    shard: NDArray[np.int32]  # (N,) number of the sample's shard
    offset: NDArray[np.int64]  # (N,) first byte of the image within its shard
    size: NDArray[np.int64]  # (N,) bytes of the image
    crc32: NDArray[np.uint32]  # (N,) of the image's bytes
    label: NDArray[np.int64]  # (N,) class number, 0 .. K-1
    width: NDArray[np.int32]  # (N,) pixels
    height: NDArray[np.int32]  # (N,) pixels
    key: NDArray[np.str_]  # (N,) name of the sample in its shard
    shard_name: NDArray[np.str_]  # (S,) file name
    shard_size: NDArray[np.int64]  # (S,) bytes
    shard_sha256: NDArray[np.str_]  # (S,) hexadecimal
    class_name: NDArray[np.str_]  # (K,)
    class_group: NDArray[np.str_]  # (K,) name of the class's super-category, or ""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.label)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all rows: two data sets with the same one are the same."""
        digest = hashlib.sha256()
        for column in fields(self):
            values = getattr(self, column.name)
            if column.name == "class_group" and not any(values.tolist()):
                continue  # a data set without groups is the one it was before there were any
            if values.dtype.kind == "U":
                digest.update("\0".join(values.tolist()).encode())
            else:
                digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    @property
    def shard_counts(self) -> NDArray[np.int64]:
        """(S,) number of samples in each shard."""
        return np.bincount(self.shard, minlength=len(self.shard_name))

    def save(self, source: "Source | Path | str", remote: RemoteSettings | None = None) -> str:
        """Write the index where the source's index belongs, whole or not at all, and return its path or URL."""
        source = parse_source(source)
        buffer = io.BytesIO()
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        np.savez_compressed(buffer, version=np.array(VERSION), **columns)
        if source.kept_index is not None:
            write_whole(source.kept_index, buffer.getvalue())
        else:
            storage_of(source.base, remote).write(source.index_name, buffer.getvalue())
        return source.index


def load_index(source: Source | Path | str, remote: RemoteSettings | None = None, compare: bool = True) -> Index:
    """Read the index of a data set, and compare it with the shards that are there.

    Args:
        source: where the shards are.
        remote: how a remote one is reached.
        compare: whether a missing shard, or one of another size, is an error.
    Raises:
        DistapError: there is no data set, it is empty, its index cannot be read or leads outside it, or a shard is
            missing or has another size than when it was indexed.
    """
    source = parse_source(source)
    if not source.scheme:
        _require_folder(source)
    storage = storage_of(source.base, remote)
    index = parse_index(_index_file(source, storage), source.index)
    if len(index) == 0:
        raise DistapError(f"{source}: the data set is empty")
    if compare:
        _compare(source, storage, index)
    return index


def _require_folder(source: Source) -> None:
    try:
        is_there = Path(source.base).is_dir()
    except OSError as error:  # such as one in a folder that this user may not enter
        raise DistapError(f"{source}: cannot be looked at: {error.strerror}") from error
    if not is_there:
        raise DistapError(f"{source}: no such data set; `distap data pack` makes one")


def parse_index(data: bytes, where: str) -> Index:
    """An index from the bytes of its file.

    Args:
        data: the file.
        where: its name, for messages.
    Raises:
        DistapError: it is no index, or one of its values cannot be.
    """
    try:
        columns: dict[str, Any] = read_columns(data, COLUMNS, optional=["class_group"])
    except ValueError as error:
        raise DistapError(f"{where}: not a readable index: {error}; make it anew with `distap data index`") from error
    version = int(columns.pop("version"))
    if version not in (1, VERSION) or (version == VERSION and "class_group" not in columns):
        raise DistapError(f"{where}: version {version} of the index, expected {VERSION}; make it anew")
    if version == 1:
        columns["class_group"] = np.zeros(len(columns["class_name"]), dtype="<U1")
    index = Index(**columns)
    for problem in _problems(index):
        raise DistapError(f"{where}: not a sound index: {problem}; make it anew with `distap data index`")
    for name in index.shard_name.tolist():
        safe_name(name, where)
    return index


def _problems(index: Index) -> Iterator[str]:
    """What cannot be, in an index of the right types; nothing where it is sound."""
    for names in (OF_SAMPLES, OF_SHARDS, OF_CLASSES):
        lengths = {name: len(getattr(index, name)) for name in names}
        if len(set(lengths.values())) > 1:
            yield "columns of unequal length: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
            return
    shards, classes = len(index.shard_name), len(index.class_name)
    if (index.shard_size < 0).any():
        yield "a shard of negative size"
    if len(set(index.shard_name.tolist())) < shards:
        yield "two shards of one name"
    if not all(_SHA256.fullmatch(digest) for digest in index.shard_sha256.tolist()):
        yield "shard_sha256 that is no SHA-256"
    known = (index.shard >= 0) & (index.shard < shards)
    ends = np.zeros(len(index), dtype=np.int64)
    ends[known] = index.shard_size[index.shard[known]]
    for wrong, what in (
        (~known, f"shard is none of 0 .. {shards - 1}"),
        ((index.label < 0) | (index.label >= classes), f"label is none of 0 .. {classes - 1}"),
        (index.size < 1, "size is below 1"),
        # A sum could overflow.
        (
            (index.offset < 0) | (index.size > ends) | (index.offset > ends - index.size),
            "image reaches beyond its shard",
        ),
        ((index.width < 1) | (index.height < 1), "width or height is below 1"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            yield f"sample {row} ({str(index.key[row])!r}): its {what}"


def _index_file(source: Source, storage: Storage) -> bytes:
    try:
        if source.kept_index is not None:
            return source.kept_index.read_bytes()
        with storage.open(source.index_name) as file:
            return file.read()
    except (FileNotFoundError, MissingFileError) as error:
        where = (
            f"{source}: no {source.index_name} in it"
            if source.kept_index is None
            else f"{source.index}: no such file"
        )
        raise DistapError(f"{where}; `distap data index {source}` makes one from its shards") from error
    except OSError as error:
        raise DistapError(f"{source.index}: cannot be read: {error}") from error


def _compare(source: Source, storage: Storage, index: Index) -> None:
    """Raise a DistapError where a shard is missing or has changed its size."""

    def about(name: str) -> About | None:
        try:
            return storage.about(name)
        except MissingFileError:
            return None

    names = index.shard_name.tolist()
    found = [about(name) for name in names[:1]]
    with ThreadPoolExecutor(AT_ONCE if source.scheme else 1) as pool:
        found += pool.map(about, names[1:])
    for name, size, shard in zip(names, index.shard_size.tolist(), found, strict=True):
        if shard is None:
            raise DistapError(f"{storage.where(name)}: the shard is missing")
        if shard.size != size:
            raise DistapError(
                f"{storage.where(name)}: {shard.size} bytes, but {size} when it was indexed; fetch or pack the shard "
                "again, or, if it was replaced on purpose, index the data set again with `distap data index`"
            )
