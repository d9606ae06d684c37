"""Read arrays of known types from .npz files that somebody else may have written."""

import io
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

HEADER = 2 * npy.ARRAY_ALIGN  # bytes of an .npy file before its values
LAST_CODE_POINT = 0x10FFFF
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
Column = NDArray[Any]


def mapped(folder: Path, name: str, column: Column | None = None) -> Column:
    """Return a read-only column of a folder that all processes share, from `column` if it is not there yet."""
    path = folder / f"{name}.npy"
    if column is not None:
        np.save(path, column, allow_pickle=False)
    is_empty = path.stat().st_size <= HEADER  # nothing can be mapped then
    return np.asarray(np.load(path, mmap_mode=None if is_empty else "r"))


def read_columns(
    data: bytes, dtypes: dict[str, str], keep: Callable[[str, Column], Column] = lambda _, column: column
) -> dict[str, Column]:
    """Read arrays of the expected types from an untrusted .npz file; raise ValueError if one is missing or wrong.

    numpy.load allocates the memory that a header declares, even terabytes. Here a header is believed only if there
    are enough bytes behind it.

    Args:
        data: contents of the file.
        dtypes: numpy type by name, "str" or "U" for text of any length; "scalar" is one int64, others have one axis.
        keep: what to return of a column, by its name; it has the next one read when it returns.
    """
    with _unreadable(""):
        archive = zipfile.ZipFile(io.BytesIO(data))
    columns = {}
    for name, dtype in dtypes.items():
        with _unreadable(f"column {name}: "):
            column = _column(archive, f"{name}.npy", dtype)
        columns[name] = keep(name, column)
        del column  # before the next one is in memory
    return columns


@contextmanager
def _unreadable(where: str) -> Iterator[None]:
    """Raise a ValueError for whatever is raised: zipfile passes on errors of struct, zlib and others."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}{str(error) or type(error).__name__}") from error


def _column(archive: zipfile.ZipFile, name: str, expected: str) -> Column:
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
    column = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="), copy=False)
    if text:
        points = column.view(np.uint32)
        rare = points[points >= FIRST_SURROGATE]
        if ((rare > LAST_CODE_POINT) | (rare <= LAST_SURROGATE)).any():
            raise ValueError("not text")
    return column.reshape(shape)
