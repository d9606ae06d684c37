"""Read descriptors from arrays and memory maps in blocks of rows, converted to the dtype of computation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError

BLOCK_NUMBERS = 2**24  # numbers of a block: 64 MB in float32


def row_blocks(
    values: Float[np.ndarray, "N C"],
    dtype: Any = np.float32,
    rows: NDArray[np.int64] | None = None,
    numbers: int | None = None,
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield blocks of at most `numbers` numbers: the places of the rows, and copies of the rows in `dtype`.

    Args:
        rows: the rows to read, in this order; None reads all.
    Raises:
        DistapError: a number is not finite.
    """
    height = max((numbers or BLOCK_NUMBERS) // max(values.shape[1], 1), 1)
    for start in range(0, len(values) if rows is None else len(rows), height):
        some = slice(start, start + height)
        yield some, finite(values[some] if rows is None else values[rows[some]], start, "descriptor", dtype)


def finite(
    values: Float[np.ndarray, "n C"], first_row: int = 0, what: str = "descriptor", dtype: Any = np.float32
) -> NDArray[Any]:
    """Return a contiguous copy of some rows in `dtype`. A DistapError names the first row that is not finite."""
    result = np.array(values, dtype, order="C")
    require_finite(result, first_row, what)
    return result


def on_device(
    values: Tensor | NDArray[Any],
    dtype: torch.dtype,
    device: torch.device,
    first_row: int = 0,
    what: str = "descriptor",
) -> Tensor:
    """Return some rows as a tensor; rows of an array are checked as in `finite`."""
    if isinstance(values, Tensor):
        return values.to(device, dtype)
    result = torch.from_numpy(np.array(values)).to(device, dtype)  # memory maps are read-only, which torch warns of
    require_finite(result, first_row, what)
    return result


def require_finite(values: Tensor | NDArray[Any], first_row: int = 0, what: str = "descriptor") -> None:
    """Raise a DistapError that names the first row that is not finite, counted from `first_row`."""
    of: Any = torch if isinstance(values, Tensor) else np
    # The sum is finite if all terms are, and needs no table of booleans.
    if not bool(of.isfinite(values.sum(dtype=of.float64))):
        row = first_row + int((~of.isfinite(values).all(1)).nonzero()[0][0])
        raise DistapError(f"{what} {row} is not finite: the network is broken, or the file damaged; extract again")
