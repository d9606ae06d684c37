"""Descriptors on disk: a folder with the arrays, their keys, and what described them.

`about.json` is written last and names every file with its size, so that a folder without it, or with a file that is
longer or shorter, is one that was never finished or was cut. Arrays are NumPy's own format, which other tools read,
or one Parquet file; never a pickle.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.storage.atomic import write_whole

ABOUT_FILE, DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE = "about.json", "descriptors.npy", "keys.npy", "classes.npy"
PARQUET_FILE = "descriptors.parquet"
VERSION = 1
ROWS_AT_ONCE = 65_536  # that are turned into a table for Parquet

# What reading a damaged array or Parquet file raises: NumPy parses the text of its headers as Python.
DAMAGE = (OSError, ValueError, KeyError, TypeError, SyntaxError, TokenError, OverflowError, MemoryError)

Form = Literal["npy", "parquet"]
Texts = NDArray[Any]  # of np.str_ of any length, which the run-time check would take for as many types


@dataclass(frozen=True)
class DescribedBy:
    """What turned images into descriptors; those of different makers cannot be compared.

    Args:
        network: hash of its tensors.
        sizing: how images were brought to size, such as `crop 224`, `side 1024` or `original`.
        scales: factors at which each image was described.
        scale_power: of the generalised mean over the scales.
        whitening: hash of what was applied behind the network; None for nothing.
    """

    network: str
    sizing: str
    scales: tuple[float, ...] = (1.0,)
    scale_power: float = 1.0
    whitening: str | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DescribedBy":
        """What `dataclasses.asdict` and JSON have made of one."""
        return cls(**{**values, "scales": tuple(values["scales"])})

    def require_same(self, other: "DescribedBy", what: str, data: str) -> None:
        """Raise a DistapError where `what` was described by something else than the descriptors of `data`."""
        differences = [
            f"{field.name} is {getattr(other, field.name)!r}, not {getattr(self, field.name)!r}"
            for field in fields(DescribedBy)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if differences:
            raise DistapError(f"{what} cannot be compared with the descriptors of {data}: {'; '.join(differences)}")


@dataclass(frozen=True)
class DescriptorSet:
    """Descriptors of N images of length 1, in the order of their data set."""

    descriptors: NDArray[Any]  # (N, C) float32 or float16, maybe a memory map
    keys: Texts  # (N,) name of each image, unlike all others
    classes: Texts  # (N,) name of its class, "" where it belongs to none
    described_by: DescribedBy
    data: str  # where the images are

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 2 or not len(self.descriptors) == len(self.keys) == len(self.classes):
            raise DistapError(
                f"{self.data}: descriptors of shape {self.descriptors.shape} for {len(self.keys)} keys and "
                f"{len(self.classes)} classes; expected (N, C), N and N"
            )

    def require_same_maker(self, other: DescribedBy, what: str) -> None:
        """Raise a DistapError where `what` was described by something else, naming every difference."""
        self.described_by.require_same(other, what, self.data)


def write_descriptors(folder: Path, descriptors: DescriptorSet, form: Form = "npy") -> None:
    """Write a folder that `read_descriptors` reads; what was there before counts no more from the start on.

    Args:
        folder: made if need be.
        descriptors: what to write; an array that lies in this folder as `descriptors.npy` already is left as it is.
        form: `npy` for arrays, `parquet` for one file with the columns key, class and descriptor.
    Raises:
        DistapError: a file cannot be written, or pyarrow is not installed.
    """
    about = folder / ABOUT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about.unlink(missing_ok=True)
        files = _write_parquet(folder, descriptors) if form == "parquet" else _write_arrays(folder, descriptors)
        sizes = {file: (folder / file).stat().st_size for file in files}
    except OSError as error:
        raise DistapError(f"{folder}: descriptors cannot be written: {error}") from error
    rows, dimensions = descriptors.descriptors.shape
    record = {
        "version": VERSION,
        "data": descriptors.data,
        "images": rows,
        "dimensions": dimensions,
        "dtype": str(descriptors.descriptors.dtype),
        "described_by": asdict(descriptors.described_by),
        "files": sizes,
    }
    write_whole(about, json.dumps(record, indent=2) + "\n")


def new_descriptors(path: Path, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    """A new .npy file as a memory map, with all of its room taken: a full disk would kill whoever writes to it.

    Raises:
        DistapError: there is no room.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise DistapError(
            f"{path}: no room for descriptors of shape {shape} in {np.dtype(dtype)}: {error.strerror or error}; what "
            "was described is kept, and the same command goes on from it"
        ) from error
    return array


def read_descriptors(folder: Path) -> DescriptorSet:
    """What `write_descriptors` wrote; arrays are mapped into memory, not read.

    Raises:
        DistapError: a file is missing, cut or of another shape than was written.
    """
    path = folder / ABOUT_FILE
    try:
        about = json.loads(path.read_text())
        version, shape, dtype = about["version"], (about["images"], about["dimensions"]), np.dtype(about["dtype"])
        described_by, data, sizes = DescribedBy.from_json(about["described_by"]), str(about["data"]), about["files"]
        parquet = sizes.get(PARQUET_FILE) is not None
    except FileNotFoundError as error:
        raise DistapError(f"{path}: no such file; `distap extract` writes it when all are described") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DistapError(f"{path}: not readable as what `distap extract` writes: {error!r}") from error
    if version != VERSION:
        raise DistapError(f"{path}: version {version!r}, this distap reads {VERSION}; extract them again")
    for name in (PARQUET_FILE,) if parquet else (DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE):
        _require_size(folder / name, sizes.get(name))
    try:
        values, keys, classes = _read_parquet(folder) if parquet else _read_arrays(folder)
    except DAMAGE as error:
        raise DistapError(f"{folder}: its descriptors are not readable: {error}") from error
    if values.shape != shape or values.dtype != dtype:
        raise DistapError(
            f"{folder}: descriptors of shape {values.shape} in {values.dtype}; {path.name} says {shape} in {dtype}"
        )
    return DescriptorSet(values, keys, classes, described_by, data)


def save_array(path: Path, values: NDArray[Any]) -> None:
    """Write an array by way of another file, since it may be a view of the one that is there."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            np.lib.format.write_array(file, values, allow_pickle=False)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_texts(folder: Path) -> tuple[Texts, Texts]:
    """Keys and classes of a folder of descriptors, or of an index.

    Raises:
        ValueError: a file holds something else.
    """
    texts = []
    for name in (KEYS_FILE, CLASSES_FILE):
        with (folder / name).open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
        if values.dtype.kind != "U" or values.ndim != 1:
            raise ValueError(f"{name} has {values.dtype} of shape {values.shape}, expected texts in one row")
        codes = values.view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:
            raise ValueError(f"{name} holds what is no character")
        texts.append(values)
    return texts[0], texts[1]


def _require_size(path: Path, expected: Any) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DistapError(f"{path}: {error.strerror}, though {ABOUT_FILE} names it; extract again") from error
    if size != expected:
        raise DistapError(
            f"{path}: {size} bytes, but {ABOUT_FILE} says {expected!r}: it was cut or is another file; extract again"
        )


def _write_arrays(folder: Path, descriptors: DescriptorSet) -> list[str]:
    values = descriptors.descriptors
    if _is_file(values, folder / DESCRIPTORS_FILE):
        values.flush()  # type: ignore[attr-defined]  # a memory map has it
    else:
        save_array(folder / DESCRIPTORS_FILE, values)
    save_array(folder / KEYS_FILE, descriptors.keys)
    save_array(folder / CLASSES_FILE, descriptors.classes)
    return [DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE]


def _is_file(values: NDArray[Any], path: Path) -> bool:
    """Whether the array is the memory map of the whole file, and not of a part or in another order."""
    return (
        isinstance(values, np.memmap)
        and Path(str(values.filename)) == path.resolve()
        and values.flags.c_contiguous
        and values.offset + values.nbytes == path.stat().st_size
    )


def _read_arrays(folder: Path) -> tuple[NDArray[Any], Texts, Texts]:
    values = np.lib.format.open_memmap(folder / DESCRIPTORS_FILE, mode="r")
    return values, *read_texts(folder)


def _write_parquet(folder: Path, descriptors: DescriptorSet) -> list[str]:
    pa, pq = _arrow()
    values = descriptors.descriptors
    dimensions = values.shape[1]
    schema = pa.schema(
        [
            ("key", pa.string()),
            ("class", pa.string()),
            ("descriptor", pa.list_(pa.from_numpy_dtype(values.dtype), dimensions)),
        ]
    )
    with pq.ParquetWriter(folder / PARQUET_FILE, schema) as writer:
        for rows in _parts(len(values)):
            flat = pa.array(np.ascontiguousarray(values[rows]).reshape(-1))
            columns = [
                pa.array(descriptors.keys[rows].tolist(), pa.string()),
                pa.array(descriptors.classes[rows].tolist(), pa.string()),
                pa.FixedSizeListArray.from_arrays(flat, dimensions),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return [PARQUET_FILE]


def _read_parquet(folder: Path) -> tuple[NDArray[Any], Texts, Texts]:
    _, pq = _arrow()
    table = pq.read_table(folder / PARQUET_FILE, columns=["key", "class", "descriptor"])
    column = table["descriptor"].combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    texts = (np.array(table[name].to_pylist(), dtype=np.str_) for name in ("key", "class"))
    return values, *texts


def _parts(total: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, total, ROWS_AT_ONCE))


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DistapError("Parquet needs pyarrow: pip install 'distap[parquet]'") from error
    return pyarrow, pyarrow.parquet
