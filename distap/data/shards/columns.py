"""The arrays of an .npz file that nobody vouches for.

numpy.load allocates what a header declares, terabytes if it says so; here a header is believed only as far as there
are bytes behind it.
"""

import io
import zipfile
from collections.abc import Sequence

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

DEFLATE_RATIO = 1032  # bytes that one compressed byte can stand for, at most
LAST_CODE_POINT, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)


def read_columns(data: bytes, dtypes: dict[str, str], optional: Sequence[str] = ()) -> dict[str, NDArray[np.generic]]:
    """Arrays of an .npz file, of the types that are expected.

    Args:
        data: the file.
        dtypes: by name, "int64" and the like for one dimension; "U" is text of any length, "scalar" one integer.
        optional: names that may be missing.
    Raises:
        ValueError: the file is damaged, or an array is missing or of another type; it is named.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile raises what its parts raise
        raise ValueError(str(error) or type(error).__name__) from error
    with archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        columns = {}
        for name, dtype in dtypes.items():
            entry = entries.get(f"{name}.npy")
            if entry is None and name in optional:
                continue
            if entry is None:
                raise ValueError(f"no column {name} in it")
            try:
                columns[name] = _column(archive, entry, dtype)
            except Exception as error:
                raise ValueError(f"column {name}: {str(error) or type(error).__name__}") from error
    return columns


def _column(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, expected: str) -> NDArray[np.generic]:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("compressed in an unknown way")
    if entry.file_size > DEFLATE_RATIO * (entry.compress_size + 1):
        raise ValueError(f"{entry.compress_size} bytes cannot hold {entry.file_size}")
    with archive.open(entry) as file:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, _, dtype = readers[npy.read_magic(file)](file)
        values = file.read()
    kind, dimensions = ("int64", 0) if expected == "scalar" else (expected, 1)
    if dtype.hasobject or (dtype.kind != "U" if kind == "U" else dtype.newbyteorder("=") != np.dtype(kind)):
        raise ValueError(f"of type {dtype}, expected {kind}")
    if len(shape) != dimensions or any(length < 0 for length in shape) or dtype.itemsize == 0:
        raise ValueError(f"of shape {shape} and type {dtype}, expected {dimensions} dimensions")
    rows = shape[0] if shape else 1
    if rows * dtype.itemsize != len(values):
        raise ValueError(f"{len(values)} bytes, but its header declares {rows} values of {dtype.itemsize}")
    column = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="))
    if kind == "U" and not _is_text(column):
        raise ValueError("not text")
    return column.reshape(shape)


def _is_text(column: NDArray[np.generic]) -> bool:
    points = column.view(np.uint32)
    first, last = SURROGATES
    return not bool(((points > LAST_CODE_POINT) | ((points >= first) & (points <= last))).any())
