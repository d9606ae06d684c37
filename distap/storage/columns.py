"""Write arrays to .npz files, and read arrays of known types from untrusted ones."""

import io
import struct
import zipfile
import zlib
from collections.abc import Collection
from mmap import mmap
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from distap.storage.texts import MAX_NAME

LONGEST_HEADER = 2**17  # bytes of an .npy file before its values
PIECE = 2**20  # code points that are compared at once
LAST_CODE_POINT = 0x10FFFF
Column = NDArray[Any]
Buffer = bytes | mmap | memoryview


def columns_file(**columns: Any) -> bytes:
    """Return an uncompressed .npz file of arrays, as `read_columns` reads it."""
    buffer = io.BytesIO()
    np.savez(buffer, **columns)
    return buffer.getvalue()


def read_columns(
    data: Buffer, dtypes: dict[str, str], optional: Collection[str] = ()
) -> dict[str, Column]:
    """Read arrays of the expected types from an untrusted .npz file.

    numpy.load allocates whatever memory a header declares, even terabytes, and unpacks a few
    compressed bytes to as much. Here columns are views of `data`, so they take no memory of their
    own; of a mapped file, all processes of a host share them.

    Args:
        data: contents of the file.
        dtypes: numpy type by name: "str" or "U" is text, "scalar" one int64, "table" text of two
            axes.
        optional: names of columns that are left out if the file lacks them.
    Raises:
        ValueError: a column is missing or wrong.
    """
    columns = {}
    where = ""
    try:
        archive = zipfile.ZipFile(data if isinstance(data, mmap) else io.BytesIO(data))  # type: ignore[arg-type]
        for name, dtype in dtypes.items():
            where = f"column {name}: "
            if name in optional and f"{name}.npy" not in archive.namelist():
                continue
            columns[name] = _column(_contents(archive, data, f"{name}.npy"), dtype)
    except Exception as error:  # zipfile passes on errors of struct, zlib and others
        raise ValueError(f"{where}{str(error) or type(error).__name__}") from error
    return columns


def _contents(archive: zipfile.ZipFile, data: Buffer, name: str) -> memoryview:
    """Return the bytes of an uncompressed file in an archive, without a copy."""
    info = archive.getinfo(name)
    # Before the contents stand 30 bytes, of which the last four give the lengths of a name and of
    # extra fields.
    start = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
    contents = memoryview(data)[start : start + info.compress_size]
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed, as numpy.savez does not write it")
    if len(contents) != info.file_size or zlib.crc32(contents) != info.CRC:
        raise ValueError("its checksum is wrong")
    return contents


def _column(contents: memoryview, expected: str) -> Column:
    head = io.BytesIO(contents[:LONGEST_HEADER])
    npy.read_magic(head)
    shape, _, dtype = npy.read_array_header_1_0(head)
    name, dimensions = {"scalar": ("int64", 0), "table": ("str", 2)}.get(expected, (expected, 1))
    is_text = np.dtype(name).kind == "U"
    is_expected = dtype.kind == "U" if is_text else dtype.newbyteorder("=") == np.dtype(name)
    if dtype.hasobject or not is_expected:
        raise ValueError(f"of type {dtype}, expected {name}")
    if len(shape) != dimensions or dtype.itemsize == 0:
        raise ValueError(f"of shape {shape} and type {dtype}, expected {dimensions} dimensions")
    if is_text and dtype.itemsize > 4 * MAX_NAME:
        raise ValueError(
            f"of texts of {dtype.itemsize // 4:,} letters; at most {MAX_NAME:,} are read"
        )
    values = np.frombuffer(contents[head.tell() :], dtype)
    # This refuses a shape that the values do not have.
    column = values.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    if is_text:
        _check_text(column.reshape(-1).view(np.uint32))
    return column


def _check_text(points: NDArray[np.uint32]) -> None:
    """Raise a ValueError unless all code points are those of names."""
    # Comparing all at once would take as much memory again.
    for start in range(0, len(points), PIECE):
        piece = points[start : start + PIECE]
        # Numbers below the first of a range become very large, and 0 fills up short texts.
        unfit = piece - 1 < 31
        if piece.max() >= 127:
            unfit |= (
                (piece - 127 < 33)
                | (piece - 0x2028 < 2)
                | (piece - 0xD800 < 0x800)
                | (piece > LAST_CODE_POINT)
            )
        if unfit.any():
            raise ValueError("a name with control characters or line ends, or no text")
