"""The index beside a data set's shards: where each sample is, and what it is.

`index.npz` holds plain arrays, one row a sample. Its fingerprint, a hash of the rows, stands for the data set in
the state of a training.
"""

import hashlib
import os
import zipfile
import zlib
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError

INDEX_FILE = "index.npz"
VERSION = 2  # version 1 had no class_group


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

    def save(self, folder: Path) -> Path:
        """Write folder/index.npz, whole or not at all."""
        path = folder / INDEX_FILE
        aside = folder / f".{INDEX_FILE}.tmp"
        with aside.open("wb") as file:
            columns = {column.name: getattr(self, column.name) for column in fields(self)}
            np.savez_compressed(file, version=np.array(VERSION), **columns)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        return path


def load_index(folder: Path) -> Index:
    """Read the index of a data set.

    Raises:
        DistapError: there is no data set, it is empty, its index cannot be read, or a shard is missing or has
            another size than when it was indexed.
    """
    path = folder / INDEX_FILE
    if not folder.is_dir():
        raise DistapError(f"{folder}: no such data set; `distap data pack` makes one")
    if not path.is_file():
        raise DistapError(f"{folder}: no {INDEX_FILE} in it; `distap data index {folder}` makes one from its shards")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            version = int(arrays["version"])
            names = [column.name for column in fields(Index) if version == VERSION or column.name != "class_group"]
            columns = {name: arrays[name] for name in names} if version in (1, VERSION) else {}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DistapError(f"{path}: not a readable index: {error}; make it anew with `distap data index`") from error
    if not columns:
        raise DistapError(f"{path}: version {version} of the index, expected {VERSION}; make it anew")
    columns.setdefault("class_group", np.zeros(len(columns["class_name"]), dtype="<U1"))
    index = Index(**columns)
    if len(index) == 0:
        raise DistapError(f"{folder}: the data set is empty")
    for name, size in zip(index.shard_name.tolist(), index.shard_size.tolist(), strict=True):
        shard = folder / name
        if not shard.is_file():
            raise DistapError(f"{shard}: the shard is missing")
        if shard.stat().st_size != size:
            raise DistapError(f"{shard}: {shard.stat().st_size} bytes, but {size} when it was indexed; make it anew")
    return index
