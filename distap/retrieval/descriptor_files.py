"""Read and write a folder of descriptors: the arrays, their keys, and a record of how they were made.

The record `about.json` names every file with its size and is written last. So a folder without it is unfinished, and
one whose files have other sizes is damaged. Arrays are .npy files or one Parquet file, never a pickle.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.hashing import FileIdentity, file_identity

ABOUT_FILE, DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE = "about.json", "descriptors.npy", "keys.npy", "classes.npy"
PARQUET_FILE = "descriptors.parquet"
VERSION = 1
PARQUET_ROWS = 65_536  # rows written to Parquet at once

# The exceptions of damaged JSON, array and Parquet files. NumPy parses the header of an array as Python code.
DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, MemoryError, SyntaxError, TokenError),
)

Form = Literal["npy", "parquet"]
Texts = NDArray[Any]  # of np.str_; beartype would treat each text length as a type of its own


@contextmanager
def reading(path: Path, command: str) -> Iterator[None]:
    """Turn the exceptions of a missing or damaged file into a DistapError that names the command which writes it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DistapError(f"{path}: no such file; `{command}` writes it") from error
    except DAMAGE as error:
        raise DistapError(f"{path}: not readable as `{command}` writes it: {error!r}") from error


@dataclass(frozen=True)
class DescribedBy:
    """How images were turned into descriptors. Only descriptors made in the same way can be compared."""

    network: str  # hash of its tensors
    sizing: str  # how images were resized, such as `crop 224`, `side 1024` or `original`
    scales: tuple[float, ...] = (1.0,)
    scale_power: float = 1.0  # of the generalised mean over the scales
    whitening: str | None = None  # hash of the whitening applied after the network, if any
    antialias: bool = True  # of images at scales below 1

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DescribedBy":
        """Undo `dataclasses.asdict` after a round trip through JSON."""
        return cls(**{**values, "scales": tuple(values["scales"])})

    def require_same(self, other: "DescribedBy", what: str, data: str) -> None:
        """Raise a DistapError listing the differences if `what` was described differently from `data`."""
        differences = [
            f"{field.name} is {getattr(other, field.name)!r}, not {getattr(self, field.name)!r}"
            for field in fields(DescribedBy)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if differences:
            raise DistapError(f"{what} cannot be compared with the descriptors of {data}: {'; '.join(differences)}")


@dataclass(frozen=True)
class DescriptorSet:
    """Descriptors of length 1 of N images, in the order of their data set."""

    descriptors: NDArray[Any]  # (N, C) float32 or float16, possibly a memory map
    keys: Texts  # (N,) unique names
    classes: Texts  # (N,) class names, "" for none
    described_by: DescribedBy
    data: str  # path or URL of the images

    def __len__(self) -> int:
        return len(self.keys)

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 2 or not len(self.descriptors) == len(self.keys) == len(self.classes):
            raise DistapError(
                f"{self.data}: descriptors of shape {self.descriptors.shape} for {len(self.keys)} keys and "
                f"{len(self.classes)} classes; expected (N, C), N and N"
            )


def write_descriptors(folder: Path, descriptors: DescriptorSet, form: Form = "npy") -> None:
    """Write a folder that `read_descriptors` reads. Earlier contents become invalid as soon as writing starts.

    Args:
        folder: created if missing.
        descriptors: an array that is already mapped from this folder's `descriptors.npy` is not copied.
        form: `npy` for arrays, or `parquet` for one file with the columns key, class and descriptor.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT_FILE).unlink(missing_ok=True)
        files = _write_parquet(folder, descriptors) if form == "parquet" else _write_arrays(folder, descriptors)
        sizes = {file: (folder / file).stat().st_size for file in files}
    except OSError as error:
        raise DistapError(f"{folder}: descriptors cannot be written: {error}") from error
    write_about(folder, descriptors, dtype=str(descriptors.descriptors.dtype), files=sizes)


def write_about(folder: Path, descriptors: DescriptorSet, **more: Any) -> None:
    """Write the record of a folder with descriptors, or with an index over them."""
    record = {
        "version": VERSION,
        "data": descriptors.data,
        "images": len(descriptors),
        "dimensions": descriptors.descriptors.shape[1],
        "described_by": asdict(descriptors.described_by),
        **more,
    }
    write_whole(folder / ABOUT_FILE, json.dumps(record, indent=2) + "\n")


@contextmanager
def read_about(folder: Path, command: str, remedy: str) -> Iterator[tuple[dict[str, Any], DescribedBy]]:
    """Read what `write_about` wrote, for the block that interprets it."""
    path = folder / ABOUT_FILE
    with reading(path, command):
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise DistapError(f"{path}: version {about['version']!r}, this distap reads {VERSION}; {remedy}")
        yield about, DescribedBy.from_json(about["described_by"])


def new_descriptors(path: Path, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    """Create a .npy file as a writable memory map with its disk space reserved.

    Without the reservation, a write to the map on a full disk would kill the process.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise DistapError(
            f"{path}: no room for descriptors of shape {shape} in {np.dtype(dtype)}: {error.strerror or error}; the "
            "finished parts are kept, and the same command continues from them"
        ) from error
    return array


def read_descriptors(folder: Path) -> DescriptorSet:
    """Read a folder that `write_descriptors` wrote, its arrays as memory maps.

    Raises:
        DistapError: a file is missing, cut or of another shape than the record says.
    """
    with read_about(folder, "distap extract", "extract again") as (about, described_by):
        shape, dtype = (about["images"], about["dimensions"]), np.dtype(about["dtype"])
        data, sizes = str(about["data"]), about["files"]
        parquet = sizes.get(PARQUET_FILE) is not None
    for name in (PARQUET_FILE,) if parquet else (DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE):
        require_intact(folder / name, sizes.get(name), "extract again")
    with reading(folder, "distap extract"):
        if parquet:
            values, keys, classes = _read_parquet(folder)
        else:
            values = np.lib.format.open_memmap(folder / DESCRIPTORS_FILE, mode="r")
            keys, classes = read_texts(folder)
    if values.shape != shape or values.dtype != dtype:
        raise DistapError(
            f"{folder}: descriptors of shape {values.shape} in {values.dtype}; {ABOUT_FILE} says {shape} in {dtype}"
        )
    return DescriptorSet(values, keys, classes, described_by, data)


def save_array(path: Path, values: NDArray[Any]) -> None:
    """Write an array to a temporary file and rename it, since the array may be mapped from the old file."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            np.lib.format.write_array(file, values, allow_pickle=False)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_texts(folder: Path) -> tuple[Texts, Texts]:
    """Keys and classes from a folder of descriptors or of an index; a ValueError if a file holds something else."""
    texts = []
    for name in (KEYS_FILE, CLASSES_FILE):
        with (folder / name).open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
        if values.dtype.kind != "U" or values.ndim != 1:
            raise ValueError(f"{name} has {values.dtype} of shape {values.shape}, expected one dimension of text")
        codes = values.view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:
            raise ValueError(f"{name} holds code points beyond Unicode")
        texts.append(values)
    return texts[0], texts[1]


def require_intact(path: Path, expected: FileIdentity | int | None, remedy: str) -> None:
    """Raise a DistapError unless a file has this size in bytes, or this size and SHA-256."""
    size_bytes = expected.bytes if isinstance(expected, FileIdentity) else expected
    try:
        found = path.stat().st_size
        if found != size_bytes:
            detail = f"{found} bytes, but {ABOUT_FILE} says {size_bytes}: it was cut or is another file"
        elif isinstance(expected, FileIdentity) and file_identity(path) != expected:
            detail = f"damaged or another file: its SHA-256 is not the one in {ABOUT_FILE}"
        else:
            return
    except OSError as error:
        raise DistapError(f"{path}: {error.strerror}, though {ABOUT_FILE} names it; {remedy}") from error
    raise DistapError(f"{path}: {detail}; {remedy}")


def _write_arrays(folder: Path, descriptors: DescriptorSet) -> list[str]:
    values, path = descriptors.descriptors, folder / DESCRIPTORS_FILE
    is_the_whole_file = (
        isinstance(values, np.memmap)
        and Path(str(values.filename)) == path.resolve()
        and values.flags.c_contiguous
        and values.offset + values.nbytes == path.stat().st_size
    )
    if is_the_whole_file:
        values.flush()  # type: ignore[attr-defined]  # it is a memory map
    else:
        save_array(path, values)
    save_array(folder / KEYS_FILE, descriptors.keys)
    save_array(folder / CLASSES_FILE, descriptors.classes)
    return [DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE]


def _write_parquet(folder: Path, descriptors: DescriptorSet) -> list[str]:
    pa, pq = _arrow()
    values = descriptors.descriptors
    kind = pa.list_(pa.from_numpy_dtype(values.dtype), values.shape[1])
    schema = pa.schema([("key", pa.string()), ("class", pa.string()), ("descriptor", kind)])
    with pq.ParquetWriter(folder / PARQUET_FILE, schema) as writer:
        for start in range(0, len(values), PARQUET_ROWS):
            rows = slice(start, start + PARQUET_ROWS)
            flat = pa.array(np.ascontiguousarray(values[rows]).reshape(-1))
            texts = descriptors.keys[rows].tolist(), descriptors.classes[rows].tolist()
            column = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            writer.write_table(pa.table([*texts, column], schema=schema))
    return [PARQUET_FILE]


def _read_parquet(folder: Path) -> tuple[NDArray[Any], Texts, Texts]:
    _, pq = _arrow()
    table = pq.read_table(folder / PARQUET_FILE, columns=["key", "class", "descriptor"])
    column = table["descriptor"].combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    texts = (np.array(table[name].to_pylist(), dtype=np.str_) for name in ("key", "class"))
    return values, *texts


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DistapError("Parquet needs pyarrow: pip install 'distap[parquet]'") from error
    return pyarrow, pyarrow.parquet
