"""The index beside a data set's shards, `index.npz`: place, class and size of every image."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import CLASS_LOOKUPS, Classes, class_columns
from distap.data.shards.image_folders import Skipped
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.columns import Column, mapped, read_columns
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, parse_source, safe_name
from distap.storage.remotes import RemoteSettings

VERSION = 3
WITHOUT_PATHS = 2  # the version before; its images are called by their keys
PIECE = 2**20  # rows whose text is in memory at once
FACTS = "facts.json"  # what is known of a shared index beside its columns
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Index:
    """N samples in S shards, of K classes."""

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
    class_group: NDArray[np.str_]  # (K,) name of the class's super-category, or ""
    left_out: tuple[Skipped, ...] = ()  # files of a folder of images that are not in it, and why

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all rows, which stands for the data set in the state of a training."""
        digest = hashlib.sha256()
        for name in COLUMNS:
            values = getattr(self, name)
            if name == "path" or (name == "class_group" and not any(values.tolist())):
                continue  # so that paths and groups left older fingerprints as they were
            if values.dtype.kind == "U":
                for start in range(0, len(values), PIECE):
                    text = "\0".join(values[start : start + PIECE].tolist())
                    digest.update(("\0" * (start > 0) + text).encode())
            else:
                digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    @cached_property
    def names(self) -> NDArray[np.str_]:
        """(N,) what the images are called: by their paths if all are known, otherwise by their keys."""
        return self.path if self.path.all() else self.key

    @cached_property
    def classes(self) -> Classes:
        """The samples by class, as the plan of batches takes them."""
        return Classes(self.label, self.class_group)

    @property
    def shard_counts(self) -> NDArray[np.int64]:
        """(S,) number of samples in each shard."""
        return np.bincount(self.shard, minlength=len(self.shard_name))

    def save(self, source: Source | Path | str, remote: RemoteSettings | None = None) -> None:
        """Write the index atomically to the place where its source expects it."""
        storage, name = index_place(parse_source(source), remote)
        storage.write(name, self.to_bytes())

    def to_bytes(self, **others: Any) -> bytes:
        """Return the contents of an index file, with other arrays beside the columns if given."""
        buffer = io.BytesIO()
        columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        np.savez_compressed(buffer, version=np.array(VERSION), **columns, **others)
        return buffer.getvalue()


HINTS = {name: hint for name, hint in get_type_hints(Index).items() if name != "left_out"}
# The numpy types of the columns by name, as read_columns takes them. NDArray[T] is an alias whose argument is T since
# numpy 2.5, and was ndarray[shape, dtype[T]].
TYPES = {name: get_args(hint)[-1] for name, hint in HINTS.items()}
COLUMNS = {name: np.dtype((get_args(of) or (of,))[0]).name for name, of in TYPES.items()}
SHARD_COLUMNS, CLASS_COLUMNS = ([name for name in COLUMNS if name.startswith(of)] for of in ("shard_", "class_"))
SAMPLE_COLUMNS = [name for name in COLUMNS if name not in (*SHARD_COLUMNS, *CLASS_COLUMNS)]


@dataclass(frozen=True)
class SharedIndex(Index):
    """An index whose columns are files of a folder, of which a process holds in memory what it asks for only."""

    folder: Path = Path()
    by_class: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)  # class_columns of the labels
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> "SharedIndex":
        """Open all files at once: they are another process's to remove once the index has changed."""
        columns: dict[str, Any] = {name: mapped(folder, name) for name in COLUMNS}
        by_class = {name: mapped(folder, name) for name in CLASS_LOOKUPS}
        return cls(**columns, folder=folder, by_class=by_class, facts=json.loads((folder / FACTS).read_bytes()))

    @classmethod
    def fill(cls, folder: Path, parse: Callable[..., Index]) -> None:
        """Write the folder of an index, which `parse` reads column by column."""
        index = parse(lambda name, column: mapped(folder, name, column))
        for name, column in class_columns(index.label, index.class_group).items():
            mapped(folder, name, column)
        facts = {"fingerprint": index.fingerprint, "names": "path" if index.names is index.path else "key"}
        write_whole(folder / FACTS, json.dumps(facts))

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedIndex.at, (self.folder,)

    @cached_property
    def fingerprint(self) -> str:
        return self.facts["fingerprint"]

    @cached_property
    def names(self) -> NDArray[np.str_]:
        return self.path if self.facts["names"] == "path" else self.key

    @cached_property
    def classes(self) -> Classes:
        return Classes(self.label, self.class_group, self.by_class)


def index_place(source: Source, remote: RemoteSettings | None) -> tuple[Storage, str]:
    """The storage of a data set's index, and its name there."""
    if source.kept_index is None:
        return storage_of(source.base, remote), source.index_name
    return storage_of(str(source.kept_index.parent)), source.kept_index.name


def parse_index(data: bytes, where: str, keep: Callable[[str, Column], Column] = lambda _, column: column) -> Index:
    """Parse the contents of the index file `where`, and check every row, so that none leads outside the data set.

    `keep` is as in `read_columns`.
    """
    remedy = "make it anew with `distap data index`"
    try:
        version = int(read_columns(data, {"version": "scalar"})["version"])
        if version not in (VERSION, WITHOUT_PATHS):
            raise DistapError(f"{where}: version {version} of the index, expected {VERSION}; {remedy}")
        stored = {name: COLUMNS[name] for name in COLUMNS if name != "path" or version != WITHOUT_PATHS}
        columns: dict[str, Any] = read_columns(data, stored, keep)
        if "path" not in columns:
            columns["path"] = keep("path", np.full(len(columns["key"]), ""))
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
