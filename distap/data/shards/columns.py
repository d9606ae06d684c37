"""Read arrays from an untrusted .npz file.

numpy.load allocates the memory that a header declares, even terabytes. Here a header is believed only if there are
enough bytes behind it.
"""

import io
import zipfile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

LAST_CODE_POINT, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)


def read_columns(data: bytes, dtypes: dict[str, str]) -> dict[str, NDArray[np.generic]]:
    """Read arrays of the expected types.

    Args:
        data: contents of the file.
        dtypes: type by name: "int64" and the like for one dimension, "U" for text of any length, "scalar" for one
            integer.
    Raises:
        ValueError: the file is damaged, or an array is missing or of another type; the message names it.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile passes on errors of struct, zlib and others
        raise ValueError(str(error) or type(error).__name__) from error
    columns = {}
    with archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for name, dtype in dtypes.items():
            if f"{name}.npy" not in entries:
                raise ValueError(f"no column {name} in it")
            try:
                columns[name] = _column(archive, entries[f"{name}.npy"], dtype)
            except Exception as error:
                raise ValueError(f"column {name}: {str(error) or type(error).__name__}") from error
    return columns


def _column(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, expected: str) -> NDArray[np.generic]:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("compressed in an unknown way")
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
    if kind == "U":
        points, (first, last) = column.view(np.uint32), SURROGATES
        if ((points > LAST_CODE_POINT) | ((points >= first) & (points <= last))).any():
            raise ValueError("not text")
    return column.reshape(shape)
