"""Read arrays of known types from untrusted .npz files."""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from distap.storage.texts import MAX_NAME

LONGEST_HEADER = 2**17  # bytes of an .npy file before its values
PIECE = 2**20
LAST_CODE_POINT = 0x10FFFF
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
Column = NDArray[Any]
Buffer = bytes | mmap | memoryview


def read_columns(data: Buffer, dtypes: dict[str, str]) -> dict[str, Column]:
    """Read arrays of the expected types from an untrusted .npz file; raise ValueError if one is missing or wrong.

    numpy.load allocates the memory that a header declares, even terabytes, and so does what a few compressed bytes
    hold. Here columns are views of `data`, so they take no memory of their own; of a mapped file, all processes of a
    host share them.

    Args:
        data: contents of the file.
        dtypes: numpy type by name, "str" or "U" for text of any length; "scalar" is one int64, others have one axis.
    """
    with _unreadable(""):
        archive = zipfile.ZipFile(data if isinstance(data, mmap) else io.BytesIO(data))  # type: ignore[arg-type]
    columns = {}
    for name, dtype in dtypes.items():
        with _unreadable(f"column {name}: "):
            columns[name] = _column(memoryview(_contents(archive, data, f"{name}.npy")), dtype)
    return columns


@contextmanager
def _unreadable(where: str) -> Iterator[None]:
    """Raise a ValueError for any error: zipfile passes on errors of struct, zlib and others."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}{str(error) or type(error).__name__}") from error


def _contents(archive: zipfile.ZipFile, data: Buffer, name: str) -> Buffer:
    """Return the bytes of an uncompressed file in an archive, without a copy."""
    if name not in archive.NameToInfo:
        raise ValueError("missing")
    info = archive.getinfo(name)
    # Before the contents stand 30 bytes, of which the last four give the lengths of a name and of extra fields.
    start = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
    contents: Buffer = memoryview(data)[start : start + info.compress_size]
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed, as numpy.savez does not write it")
    if len(contents) != info.file_size or zlib.crc32(contents) != info.CRC:
        raise ValueError("its checksum is wrong")
    return contents


def _column(contents: memoryview, expected: str) -> Column:
    head = io.BytesIO(contents[:LONGEST_HEADER])
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    shape, _, dtype = readers[npy.read_magic(head)](head)
    values = contents[head.tell() :]
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
    if text and dtype.itemsize > 4 * MAX_NAME:
        raise ValueError(f"of texts of {dtype.itemsize // 4:,} letters; at most {MAX_NAME:,} are read")
    if text:
        points = column.view(np.uint32)
        last = points.max(initial=0)
        if last >= FIRST_SURROGATE:
            rare = points[points >= FIRST_SURROGATE]
            if ((rare > LAST_CODE_POINT) | (rare <= LAST_SURROGATE)).any():
                raise ValueError("not text")
        for start in range(0, len(points), PIECE):  # comparing all at once would take as much memory again
            piece = points[start : start + PIECE]
            # Numbers below the first of a range become very large, and 0 fills up short texts.
            if (piece - 1 < 31).any() or (last >= 127 and ((piece - 127 < 33) | (piece - 0x2028 < 2)).any()):
                raise ValueError("a name with control characters or line ends")
    return column.reshape(shape)
