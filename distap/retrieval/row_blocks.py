"""Read descriptors from arrays and memory maps in blocks of rows, converted to the dtype of computation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError

BLOCK_NUMBERS = 2**24  # numbers of a block: 64 MB in float32
Descriptors = Any  # descriptors (N, C): a tensor, an array or memory map, or `DescriptorParts`
FLOATS = ("float16", "float32", "float64", "bfloat16", "f2", "f4", "f8")
LENGTH_TOLERANCE = 0.02  # bfloat16 rounds a descriptor's length by up to 0.4%


def row_blocks(
    values: Descriptors, dtype: Any = np.float32, numbers: int | None = None
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield blocks of at most `numbers` numbers: the places of the rows, and copies of the rows in `dtype`.

    Raises:
        DistapError: a number is not finite.
    """
    height = max((numbers or BLOCK_NUMBERS) // max(values.shape[1], 1), 1)
    for start in range(0, len(values), height):
        some = slice(start, start + height)
        yield some, finite(values[some], start, "descriptor", dtype)


def finite(
    values: Float[np.ndarray, "n C"], first_row: int = 0, what: str = "descriptor", dtype: Any = np.float32
) -> NDArray[Any]:
    """Return a contiguous copy of some rows in `dtype`. A DistapError names the first row that is not finite."""
    result = np.array(values, dtype, order="C")
    require_finite(result, first_row, what)
    return result


def given_rows(
    values: Any, what: str = "descriptor", dot_product: bool = False, single: bool = False
) -> Tensor | NDArray[Any]:
    """Check descriptors from outside: a tensor or array (N, C) of any layout and device, or a list of N vectors.

    Args:
        dot_product: accept lengths other than 1.
        single: one vector (C,) stands for (1, C).
    Raises:
        DistapError: they have another shape or type, are not finite, or are not of length 1.
    """
    if not isinstance(values, Tensor | np.ndarray):
        try:
            one_by_one = (one.detach().float().cpu() if isinstance(one, Tensor) else one for one in values)
            values = np.array([np.asarray(one) for one in one_by_one])
        except (ValueError, TypeError) as error:  # of vectors that differ in length, or None
            raise DistapError(f"{what}s: {error}") from error
    values = values.detach() if isinstance(values, Tensor) else values
    shape, dtype = tuple(values.shape), str(values.dtype).removeprefix("torch.")
    values = values[None] if single and len(shape) == 1 else values
    if values.ndim != 2 or dtype.lstrip("<>") not in FLOATS:
        expected = f"(N, C){' or (C,)' * single} of {', '.join(FLOATS[:4])}"
        raise DistapError(f"{what}s are {shape} of {dtype}; expected {expected}")
    height = max(BLOCK_NUMBERS // max(values.shape[1], 1), 1)
    for start in range(0, len(values), height):
        require_length_one(values[start : start + height], start, what, dot_product)
    return values


def require_length_one(
    values: Tensor | NDArray[Any], first_row: int = 0, what: str = "descriptor", dot_product: bool = False
) -> None:
    """Raise a DistapError that names the first row that is not finite or, without `dot_product`, not of length 1."""
    rows = on_device(values, torch.float32, torch.device(values.device), first_row, what)  # an array's is "cpu"
    lengths = torch.linalg.vector_norm(rows, dim=1)
    wrong = ((lengths - 1).abs() > LENGTH_TOLERANCE).nonzero()
    if len(wrong) and not dot_product:
        length = f"{what} {first_row + int(wrong[0])} has length {float(lengths[wrong[0]]):.4g}, expected 1"
        remedy = "normalise all (torch.nn.functional.normalize), or give dot_product=True to rank by the dot product"
        raise DistapError(f"{length}: {remedy}")


def on_device(
    values: Tensor | NDArray[Any],
    dtype: torch.dtype,
    device: torch.device,
    first_row: int = 0,
    what: str = "descriptor",
) -> Tensor:
    """Return some rows as a tensor on a device. A DistapError names the first row that is not finite."""
    if isinstance(values, np.ndarray):
        # torch takes no array that is read-only, reversed or of the other byte order, so give it a copy.
        values = torch.from_numpy(np.array(values, values.dtype.newbyteorder("="), order="C"))
    result = values.to(device, dtype)
    require_finite(result, first_row, what)
    return result


def taken(values: Descriptors, rows: Int64[Tensor, " n"]) -> Tensor | NDArray[Any]:
    """Return some rows of a tensor or an array, in this order."""
    return values[rows.to(values.device)] if isinstance(values, Tensor) else values[rows.cpu().numpy()]


def require_finite(values: Tensor | NDArray[Any], first_row: int = 0, what: str = "descriptor") -> None:
    """Raise a DistapError that names the first row that is not finite, counted from `first_row`."""
    of: Any = torch if isinstance(values, Tensor) else np
    # The sum is finite if all terms are, and needs no table of booleans.
    if not bool(of.isfinite(values.sum(dtype=of.float64))):
        row = first_row + int((~of.isfinite(values).all(1)).nonzero()[0][0])
        raise DistapError(f"{what} {row} is not finite: the network is broken, or the file damaged; extract again")


def require_same_dimensions(queries: Descriptors, gallery: Descriptors) -> None:
    if queries.shape[1] != gallery.shape[1]:
        raise DistapError(
            f"queries have {queries.shape[1]} dimensions and the gallery {gallery.shape[1]}: another network's?"
        )
