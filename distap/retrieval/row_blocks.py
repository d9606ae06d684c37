"""Read descriptors in blocks of rows, and find the nearest of a gallery exactly.

Rows come from arrays, memory maps, or parts of any number: .npy files, HDF5 as the extractor of
ILIAS writes it, and extracted folders.
"""

from collections.abc import Iterator, Sequence, ValuesView
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import LENGTH_TOLERANCE, DistapError, tensor_given
from distap.retrieval.descriptor_files import (
    ABOUT_FILE,
    EXTRACTION_FILE,
    DescribedBy,
    read_descriptors,
    reading,
)
from distap.storage.texts import open_regular

BLOCK_NUMBERS = 2**24  # numbers of a block: 64 MB in float32
Descriptors = Any  # descriptors (N, C): a tensor, an array or memory map, or `DescriptorParts`
FLOATS = ("float16", "float32", "float64", "bfloat16", "f2", "f4", "f8")
GPU_RESULTS = 2048  # most for a query that Faiss finds on a GPU
HDF5_SUFFIXES = (".h5", ".hdf5")
PART_SUFFIXES = (".npy", *HDF5_SUFFIXES)
# of the array in a file of ILIAS's extractor; `index` has the names of the images
HDF5_NAME = "features"


def row_blocks(
    values: Descriptors, dtype: Any = np.float32, numbers: int | None = None
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield blocks of rows: their places, and copies in `dtype` of at most `numbers` numbers.

    Raises:
        DistapError: a number is not finite.
    """
    height = max((numbers or BLOCK_NUMBERS) // max(values.shape[1], 1), 1)
    for start in range(0, len(values), height):
        places = slice(start, start + height)
        copies = on_device(values[places], getattr(torch, np.dtype(dtype).name), first_row=start)
        yield places, copies.numpy()


def given_rows(
    values: Any, name: str = "descriptor", dot_product: bool = False, single: bool = False
) -> Tensor | NDArray[Any]:
    """Check descriptors that a caller gave: a tensor or array (N, C), or a list of N vectors.

    Args:
        name: what messages call a row.
        dot_product: accept lengths other than 1.
        single: one vector (C,) stands for (1, C).
    Raises:
        DistapError: they have another shape or type, are not finite, or are not of length 1.
    """
    if isinstance(values, Iterator | ValuesView):
        values = list(values)
    if not isinstance(values, np.ndarray):
        values = tensor_given(values, f"{name}s").detach()
    shape = tuple(values.shape)
    dtype = str(values.dtype).removeprefix("torch.")
    if single and len(shape) == 1:
        values = values[None]
    if values.ndim != 2 or dtype.lstrip("<>") not in FLOATS:
        expected = f"(N, C){' or (C,)' * single} of {', '.join(FLOATS[:4])}"
        raise DistapError(
            "descriptors.wrong_shape", f"{name}s are {shape} of {dtype}; expected {expected}"
        )
    height = max(BLOCK_NUMBERS // max(values.shape[1], 1), 1)
    for start in range(0, len(values), height):
        require_length_one(values[start : start + height], start, name, dot_product)
    return values


def require_length_one(
    values: Tensor | NDArray[Any],
    first_row: int = 0,
    name: str = "descriptor",
    dot_product: bool = False,
) -> None:
    """Raise a DistapError for the first row that is not finite or not of length 1.

    Args:
        first_row: number of the first row, for the message.
        dot_product: accept any length.
    """
    rows = on_device(values, torch.float32, values.device, first_row, name)  # an array's is "cpu"
    lengths = torch.linalg.vector_norm(rows, dim=1)
    wrong = ((lengths - 1).abs() > LENGTH_TOLERANCE).nonzero()
    if len(wrong) and not dot_product:
        raise DistapError(
            "descriptors.wrong_length",
            f"{name} {first_row + int(wrong[0])} has length {float(lengths[wrong[0]]):.4g},"
            " expected 1: normalise all (torch.nn.functional.normalize), or give dot_product=True"
            " to rank by the dot product",
        )


def on_device(
    values: Tensor | NDArray[Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    first_row: int = 0,
    name: str = "descriptor",
) -> Tensor:
    """Return some rows as a tensor on a device, those of an array as a copy.

    Raises:
        DistapError: a row is not finite; the message calls it `name`, counted from `first_row`.
    """
    if isinstance(values, np.ndarray):
        # torch takes no array that is read-only, reversed or of the other byte order, so give it a
        # copy.
        values = torch.from_numpy(np.array(values, values.dtype.newbyteorder("="), order="C"))
    result = values.to(device, dtype)
    # The sum is finite if all terms are, and needs no table of booleans.
    if not bool(result.sum(dtype=torch.float64).isfinite()):
        row = first_row + int((~result.isfinite().all(1)).nonzero()[0])
        raise DistapError(
            "descriptors.not_finite",
            f"{name} {row} is not finite: the network is broken, or the file damaged; extract"
            " again",
        )
    return result


def taken(values: Descriptors, rows: Int64[Tensor, " n"]) -> Tensor | NDArray[Any]:
    """Return some rows of a tensor or an array, in this order."""
    if isinstance(values, Tensor):
        return values[rows.to(values.device)]
    read: NDArray[Any] = values[rows.cpu().numpy()]
    return read


def require_same_dimensions(queries: Descriptors, gallery: Descriptors) -> None:
    if queries.shape[1] != gallery.shape[1]:
        raise DistapError(
            "descriptors.wrong_dimensions",
            f"queries have {queries.shape[1]} dimensions and the gallery {gallery.shape[1]}:"
            " another network's?",
        )


def installed_faiss() -> Any:
    """Return the module of Faiss, which only search needs. Raise a DistapError if it is missing."""
    try:
        import faiss
        import faiss.contrib.exhaustive_search
    except ImportError as error:
        raise DistapError(
            "package.missing",
            "the search for neighbours needs Faiss: pip install 'distap[cpu]', or 'distap[gpu]' for"
            f" NVIDIA GPUs ({error})",
        ) from error
    faiss.omp_set_num_threads(torch.get_num_threads())  # ranks on one machine share its cores
    return faiss


def nearest(
    queries: Descriptors, gallery: Descriptors, k: int, exclude_self: bool = False
) -> tuple[Float32[np.ndarray, "Q k"], Int64[np.ndarray, "Q k"]]:
    """Return similarities and rows of each query's k nearest gallery descriptors, best first.

    Nearest is by the inner product; among equal ones, the lower row comes first. Numbers of any
    float type are compared in float32. A build of Faiss for GPUs searches on all GPUs that it sees.

    Args:
        gallery: (N, C); a memory map is read once, in blocks.
        k: at most the size of the gallery; a larger k is reduced.
        exclude_self: query i is row i of the gallery. Remove it by its index, not by its
            similarity.
    """
    require_same_dimensions(queries, gallery)
    k = max(min(k, len(gallery) - exclude_self), 0)
    wanted = k + exclude_self
    if not k or not len(queries):
        return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    faiss = installed_faiss()
    asked = on_device(queries[:], name="query").numpy()
    blocks = (block for _, block in row_blocks(gallery))
    gpus = -1 if wanted <= GPU_RESULTS else 0  # -1: all
    search = faiss.contrib.exhaustive_search.knn_ground_truth
    similarities, rows = search(asked, blocks, wanted, faiss.METRIC_INNER_PRODUCT, ngpu=gpus)
    order = np.lexsort((rows, -similarities), axis=1)  # Faiss leaves the order of ties open
    similarities = np.take_along_axis(similarities, order, axis=1)
    rows = np.take_along_axis(rows, order, axis=1)
    if exclude_self:
        return without_rows(similarities, rows, np.arange(len(queries)))
    return similarities, rows


def without_rows(
    similarities: Float32[np.ndarray, "Q K"],
    rows: Int64[np.ndarray, "Q K"],
    removed: Int64[np.ndarray, " Q"],
) -> tuple[Float32[np.ndarray, "Q K-1"], Int64[np.ndarray, "Q K-1"]]:
    """Remove row removed[q] from the results of query q, or the last result if it is not there."""
    is_kept = rows != removed[:, None]
    is_kept[is_kept.all(axis=1), -1] = False
    shape = (len(rows), rows.shape[1] - 1)
    return similarities[is_kept].reshape(shape), rows[is_kept].reshape(shape)


class TakenRows:
    """Rows (n, C) of an array or a mapped file, by their numbers, which are read when taken."""

    ndim = 2

    def __init__(self, values: Descriptors, rows: Int64[np.ndarray, " n"]) -> None:
        self._values = values
        self._rows = rows
        self.shape = (len(rows), int(values.shape[1]))
        self.dtype = values.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: Any) -> NDArray[Any]:
        rows: NDArray[Any] = self._values[self._rows[chosen]]
        return rows


class DescriptorParts:
    """Rows (N, C) of several arrays, one after the other, which are read when they are taken."""

    ndim = 2

    def __init__(self, parts: Sequence[tuple[str, Any]], dot_product: bool = True) -> None:
        """`parts` are arrays (n, C), possibly in a file, each with its name for messages.

        Without `dot_product`, rows that are not of length 1 are refused when they are read.
        """
        self._parts = parts
        self._dot_product = dot_product
        self._ends = np.cumsum([len(rows) for _, rows in parts])
        self.shape = (int(self._ends[-1]), int(parts[0][1].shape[1]))
        self.dtype = np.dtype(parts[0][1].dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | Int64[np.ndarray, "..."]) -> NDArray[Any]:
        """Read the rows of a slice, or those that are numbered by an array of any shape."""
        if isinstance(chosen, slice):
            chosen = np.arange(*chosen.indices(len(self)))
        numbers, back = np.unique(chosen, return_inverse=True)  # HDF5 reads ascending rows alone
        of_parts = np.split(numbers, np.searchsorted(numbers, self._ends[:-1]))
        # It begins with no rows, because `np.concatenate` refuses an empty list.
        read = [np.empty((0, self.shape[1]), self.dtype)]
        for (name, rows), end, wanted in zip(
            self._parts, self._ends.tolist(), of_parts, strict=True
        ):
            if not len(wanted):
                continue
            places = wanted - (end - len(rows))
            first = int(places[0])
            last = int(places[-1])
            is_run = last - first + 1 == len(places)
            with reading(Path(name), "the extractor"):
                values = np.asarray(rows[first : last + 1] if is_run else rows[places])
            require_length_one(values, first, f"{name}: descriptor", self._dot_product)
            read.append(values)
        return np.concatenate(read)[back].reshape(*chosen.shape, self.shape[1])


def open_parts(
    paths: Sequence[Path | str],
    dimensions: int | None,
    dot_product: bool = False,
    described_by: DescribedBy | None = None,
) -> DescriptorParts | None:
    """Open files of descriptors, and folders of such files; return None if there is no path.

    Args:
        dimensions: C, which all must have; None takes any.
        dot_product: see `given_rows`.
        described_by: what folders of `distap extract` must have been described by; None takes any.
    Raises:
        DistapError: a path is missing, damaged or holds something else, or it is another network's.
    """
    parts = [part for path in map(Path, paths) for part in _opened(path, described_by)]
    for name, rows in parts:
        if len(rows.shape) != 2 or rows.dtype.name not in FLOATS:
            raise DistapError(
                "descriptors.wrong_shape",
                f"{name}: {rows.dtype} of shape {rows.shape}; expected descriptors (N, C)",
            )
        if dimensions not in (None, rows.shape[1]):
            raise DistapError(
                "descriptors.wrong_dimensions",
                f"{name}: descriptors of {rows.shape[1]} dimensions, expected {dimensions}",
            )
    return DescriptorParts(parts, dot_product) if parts else None


def _opened(path: Path, described_by: DescribedBy | None) -> Iterator[tuple[str, Any]]:
    if any((path / name).exists() for name in (ABOUT_FILE, EXTRACTION_FILE)):
        stored = read_descriptors(path)
        if described_by not in (None, *stored.makers):
            raise DistapError(
                "descriptors.other_network",
                f"{path}: described by {stored.described_by}, expected {described_by}",
            )
        yield str(path), stored.descriptors
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in PART_SUFFIXES)
        if not files:
            raise DistapError(
                "descriptors.missing",
                f"{path}: no descriptors in it; expected {', '.join(PART_SUFFIXES)} files",
            )
        for file in files:
            yield from _opened(file, None)
    elif path.suffix == ".npy":
        with reading(path, "numpy.save"):
            open_regular(path).close()
            yield str(path), np.load(path, mmap_mode="r", allow_pickle=False)
    elif path.suffix in HDF5_SUFFIXES:
        yield str(path), _opened_hdf5(path)
    else:
        problem = "no descriptors" if path.exists() else "no such file"
        raise DistapError(
            "descriptors.missing",
            f"{path}: {problem}; expected {', '.join(PART_SUFFIXES)}, or a folder of them or of"
            " `distap extract`",
        )


def _opened_hdf5(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise DistapError(
            "package.missing", f"{path}: needs h5py: pip install 'distap[hdf5]' ({error})"
        ) from error
    with reading(path, "the extractor of ILIAS"):
        open_regular(path).close()
        rows = h5py.File(path)[HDF5_NAME]
        if not isinstance(rows, h5py.Dataset) or rows.shape is None:
            raise ValueError(
                f"{HDF5_NAME} is a {type(rows).__name__} without numbers, expected an array (N, C)"
            )
    return rows
