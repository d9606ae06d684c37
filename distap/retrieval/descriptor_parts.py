"""Read descriptors in parts of any size: .npy files, HDF5 as the extractor of ILIAS writes it, extracted folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.descriptor_files import ABOUT_FILE, EXTRACTION_FILE, DescribedBy, read_descriptors, reading
from distap.retrieval.row_blocks import FLOATS, require_length_one

HDF5_SUFFIXES = (".h5", ".hdf5")
PART_SUFFIXES = (".npy", *HDF5_SUFFIXES)
HDF5_NAME = "features"  # of the array in a file of ILIAS's extractor; `index` has the names of the images


class DescriptorParts:
    """Rows (N, C) of several arrays, one after the other, which are read when they are taken."""

    ndim = 2

    def __init__(self, parts: Sequence[tuple[str, Any]], dot_product: bool = True) -> None:
        """`parts` are arrays (n, C), possibly in a file, each with its name for messages.

        Without `dot_product`, rows that are not of length 1 are refused when they are read.
        """
        self._parts, self._dot_product = parts, dot_product
        self._ends = np.cumsum([len(rows) for _, rows in parts])
        self.shape, self.dtype = (int(self._ends[-1]), int(parts[0][1].shape[1])), np.dtype(parts[0][1].dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | Int64[np.ndarray, "..."]) -> NDArray[Any]:
        """Read the rows of a slice, or those that are numbered by an array of any shape."""
        if isinstance(chosen, slice):
            chosen = np.arange(*chosen.indices(len(self)))
        numbers, back = np.unique(chosen, return_inverse=True)  # HDF5 reads ascending rows alone
        cuts = np.searchsorted(numbers, self._ends)
        read = []
        for part in np.flatnonzero(np.diff(cuts, prepend=0)).tolist():
            name, rows = self._parts[part]
            own = numbers[cuts[part - 1] if part else 0 : cuts[part]] - (self._ends[part - 1] if part else 0)
            is_whole = own[-1] - own[0] + 1 == len(own)
            with reading(Path(name), "the extractor"):
                found = np.asarray(rows[int(own[0]) : int(own[-1]) + 1] if is_whole else rows[own])
            require_length_one(found, int(own[0]), f"{name}: descriptor", self._dot_product)
            read.append(found)
        if not read:
            return np.empty((*chosen.shape, self.shape[1]), self.dtype)
        return np.concatenate(read)[back].reshape(*chosen.shape, self.shape[1])


def open_parts(
    paths: Sequence[Path | str], dimensions: int, dot_product: bool = False, described_by: DescribedBy | None = None
) -> DescriptorParts | None:
    """Open files of descriptors, and folders of such files; return None if there is no path.

    Args:
        dimensions: C, which all must have.
        dot_product: see `given_rows`.
        described_by: what folders of `distap extract` must have been described by; None takes any.
    Raises:
        DistapError: a path is missing, damaged or holds something else, or it is another network's.
    """
    parts = [part for path in map(Path, paths) for part in _opened(path, described_by)]
    for name, rows in parts:
        if len(rows.shape) != 2 or rows.dtype.name not in FLOATS:
            raise DistapError(f"{name}: {rows.dtype} of shape {rows.shape}; expected descriptors (N, C)")
        if rows.shape[1] != dimensions:
            raise DistapError(f"{name}: descriptors of {rows.shape[1]} dimensions, expected {dimensions}")
    return DescriptorParts(parts, dot_product) if parts else None


def holds_descriptors(path: Path | str) -> bool:
    """Return whether a path is a file of descriptors, or a folder that holds some."""
    path = Path(path)
    return path.suffix in PART_SUFFIXES or (path / ABOUT_FILE).exists() or bool(_files(path))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in PART_SUFFIXES) if folder.is_dir() else []


def _opened(path: Path, described_by: DescribedBy | None) -> Iterator[tuple[str, Any]]:
    if any((path / name).exists() for name in (ABOUT_FILE, EXTRACTION_FILE)):
        stored = read_descriptors(path)
        if described_by not in (None, stored.described_by):
            raise DistapError(f"{path}: described by {stored.described_by}, expected {described_by}")
        yield str(path), stored.descriptors
    elif path.is_dir():
        if not (files := _files(path)):
            raise DistapError(f"{path}: no descriptors in it; expected {', '.join(PART_SUFFIXES)} files")
        for file in files:
            yield from _opened(file, None)
    elif path.suffix == ".npy":
        with reading(path, "numpy.save"):
            yield str(path), np.load(path, mmap_mode="r", allow_pickle=False)
    elif path.suffix in HDF5_SUFFIXES:
        try:
            import h5py
        except ImportError as error:
            raise DistapError(f"{path}: needs h5py: pip install 'distap[hdf5]' ({error})") from error
        with reading(path, "the extractor of ILIAS"):
            yield str(path), h5py.File(path)[HDF5_NAME]
    else:
        expected = f"expected {', '.join(PART_SUFFIXES)}, or a folder of them or of `distap extract`"
        raise DistapError(f"{path}: {'no descriptors' if path.exists() else 'no such file'}; {expected}")
