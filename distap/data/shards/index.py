"""The index beside a data set's shards, `index.npz`: place, class and size of every image."""

import hashlib
import io
import math
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from distap.data.map_style import rows_behind
from distap.data.shards.image_files import ImageFile, group_of_each_class, list_images, look_at_all, sort_classes
from distap.data.shards.left_out import Skipped, as_line, is_line
from distap.data.shards.parallel import untracked
from distap.errors import DistapError
from distap.storage.files import Storage, storage_of
from distap.storage.locations import Source, parse_source, safe_name
from distap.storage.remotes import MissingFileError, RemoteSettings

VERSION = 3
WITHOUT_PATHS = 2  # the version before; its images are called by their keys
THREADS = 16  # remote shards whose sizes are asked for at once
LAST_CODE_POINT = 0x10FFFF
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
                digest.update("\0".join(values.tolist()).encode())
            else:
                digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    @cached_property
    def names(self) -> NDArray[np.str_]:
        """(N,) what the images are called: by their paths if all are known, otherwise by their keys."""
        return self.path if self.path.all() else self.key

    @property
    def shard_counts(self) -> NDArray[np.int64]:
        """(S,) number of samples in each shard."""
        return np.bincount(self.shard, minlength=len(self.shard_name))

    def save(self, source: Source | Path | str, remote: RemoteSettings | None = None) -> None:
        """Write the index atomically to the place where its source expects it."""
        storage, name = _place(parse_source(source), remote)
        storage.write(name, self.to_bytes())

    def to_bytes(self, **others: Any) -> bytes:
        """Return the contents of an index file, with other arrays beside the columns if given."""
        buffer = io.BytesIO()
        columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        np.savez_compressed(buffer, version=np.array(VERSION), **columns, **others)
        return buffer.getvalue()


HINTS = {name: hint for name, hint in get_type_hints(Index).items() if name != "left_out"}
# The numpy types of the columns by name, as read_columns takes them.
COLUMNS = {name: np.dtype(get_args(get_args(array)[1])[0]).name for name, array in HINTS.items()}
SHARD_COLUMNS, CLASS_COLUMNS = ([name for name in COLUMNS if name.startswith(of)] for of in ("shard_", "class_"))
SAMPLE_COLUMNS = [name for name in COLUMNS if name not in (*SHARD_COLUMNS, *CLASS_COLUMNS)]


def load_index(source: Source | Path | str, remote: RemoteSettings | None = None, compare: bool = True) -> Index:
    """Read and check the index of a data set, and with `compare` that its shards exist and have the same sizes."""
    source = parse_source(source)
    if (rows := rows_behind(source)) is not None:
        names, digests = list(map(str, range(len(rows.keys)))), rows.digests()
        return _index_of_files(source, names, list(rows.keys), list(rows.classes), 0, digests)
    if source.kind == "imagefolder":
        return _index_of_images(source)
    storage, name = _place(source, remote)
    try:
        with storage.open(name) as file:
            index = parse_index(file.read(), source.index)
    except MissingFileError as error:
        if not source.scheme and not Path(source.base).is_dir():
            raise DistapError(f"{source}: no such data set; `distap data pack` makes one") from error
        if not source.scheme and source.pattern is None and not any(Path(source.base).glob("*.tar")):
            raise DistapError(
                f"{source}: no .tar file is in it; for a folder with a sub-folder a class write "
                f"imagefolder:{source}, or pack it by `distap data pack`"
            ) from error
        missing = f"{source.index}: no such file" if source.kept_index else f"{source}: no {name} in it"
        raise DistapError(f"{missing}; `distap data index {source}` makes one from its shards") from error
    if len(index) == 0:
        raise DistapError(f"{source}: the data set is empty")
    if compare:
        _require_shards(source, remote, index)
    return index


def _index_of_images(source: Source) -> Index:
    folder = Path(source.base)
    if not folder.is_dir():
        raise DistapError(f"{source}: no such folder")
    listing = list_images(folder)
    entries, broken = look_at_all(listing.images, "", untracked)
    images = [entry.image for entry in entries]
    sizes = np.array([entry.size for entry in entries], dtype=np.int64)
    names = [image.path.relative_to(folder).as_posix() for image in images]
    index = _index_of_files(source, names, names, [image.class_name for image in images], sizes)
    left_out = tuple(Skipped(as_line(name), reason) for name, reason in (*listing.left_out, *broken))
    return replace(index, left_out=left_out)


def _index_of_files(
    source: Source, names: list[str], keys: list[str], of_class: list[str], sizes: Any, digests: Any = ""
) -> Index:
    """An index that takes each image file for a shard; sizes, digests and checksums may be 0 or "", unknown."""
    for key in keys:
        if not is_line(key):
            raise DistapError(f"{source}: {key!r}: rename it without tabs, line breaks and bytes that are no UTF-8")
    classes = sort_classes(group_of_each_class([ImageFile(Path(source.base), name) for name in set(of_class)]))
    numbers = {name: number for number, name in enumerate(classes)}
    count, zeros = len(names), np.zeros(len(names), dtype=np.int32)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.int64), count).copy()
    return Index(
        shard=np.arange(count, dtype=np.int32),
        offset=np.zeros(count, dtype=np.int64),
        size=size,
        crc32=np.zeros(count, dtype=np.uint32),
        label=np.array([numbers[name] for name in of_class], dtype=np.int64),
        width=zeros,
        height=zeros,
        key=np.array(keys),
        path=np.array(keys),
        shard_name=np.array(names),
        shard_size=size,
        shard_sha256=np.broadcast_to(np.asarray(digests), count).copy(),
        class_name=np.array(classes),
        class_group=np.full(len(classes), ""),
    )


def _place(source: Source, remote: RemoteSettings | None) -> tuple[Storage, str]:
    if source.kept_index is None:
        return storage_of(source.base, remote), source.index_name
    return storage_of(str(source.kept_index.parent)), source.kept_index.name


def parse_index(data: bytes, where: str) -> Index:
    """Parse the contents of the index file `where`, and check every row, so that none leads outside the data set."""
    remedy = "make it anew with `distap data index`"
    try:
        version = int(read_columns(data, {"version": "scalar"})["version"])
        if version not in (VERSION, WITHOUT_PATHS):
            raise DistapError(f"{where}: version {version} of the index, expected {VERSION}; {remedy}")
        stored = {name: COLUMNS[name] for name in COLUMNS if name != "path" or version != WITHOUT_PATHS}
        columns: dict[str, Any] = read_columns(data, stored)
        columns.setdefault("path", np.full(len(columns["key"]), ""))
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


def _require_shards(source: Source, remote: RemoteSettings | None, index: Index) -> None:
    storage, names = storage_of(source.base, remote), index.shard_name.tolist()
    first = storage.about(names[0])  # alone, so that a wrong setting is tried once
    with ThreadPoolExecutor(THREADS if source.scheme else 1) as pool:
        found = [first, *pool.map(storage.about, names[1:])]
    for name, size, shard in zip(names, index.shard_size.tolist(), found, strict=True):
        if shard.size != size:
            raise DistapError(
                f"{storage.where(name)}: {shard.size} bytes, but {size} when it was indexed; fetch or pack it again, "
                "or, if it was replaced on purpose, index the data set again with `distap data index`"
            )


def read_columns(data: bytes, dtypes: dict[str, str]) -> dict[str, NDArray[np.generic]]:
    """Read arrays of the expected types from an untrusted .npz file; raise ValueError if one is missing or wrong.

    numpy.load allocates the memory that a header declares, even terabytes. Here a header is believed only if there
    are enough bytes behind it.

    Args:
        data: contents of the file.
        dtypes: numpy type by name, "str" or "U" for text of any length; "scalar" is one int64, others have one axis.
    """
    columns, where = {}, ""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name, dtype in dtypes.items():
                where = f"column {name}: "
                columns[name] = _column(archive, f"{name}.npy", dtype)
    except Exception as error:  # zipfile passes on errors of struct, zlib and others
        raise ValueError(f"{where}{str(error) or type(error).__name__}") from error
    return columns


def _column(archive: zipfile.ZipFile, name: str, expected: str) -> NDArray[np.generic]:
    if name not in archive.NameToInfo:
        raise ValueError("missing")
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("compressed in an unknown way")
    with archive.open(name) as file:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, _, dtype = readers[npy.read_magic(file)](file)
        values = file.read()
    name, dimensions = ("int64", 0) if expected == "scalar" else (expected, 1)
    text = np.dtype(name).kind == "U"
    if dtype.hasobject or (dtype.kind != "U" if text else dtype.newbyteorder("=") != np.dtype(name)):
        raise ValueError(f"of type {dtype}, expected {name}")
    if len(shape) != dimensions or any(length < 0 for length in shape) or dtype.itemsize == 0:
        raise ValueError(f"of shape {shape} and type {dtype}, expected {dimensions} dimensions")
    rows = math.prod(shape)
    if rows * dtype.itemsize != len(values):
        raise ValueError(f"{len(values)} bytes, but its header declares {rows} values of {dtype.itemsize}")
    column = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="))
    if text:
        points = column.view(np.uint32)
        if ((points > LAST_CODE_POINT) | ((points >= 0xD800) & (points <= 0xDFFF))).any():  # or a surrogate
            raise ValueError("not text")
    return column.reshape(shape)
