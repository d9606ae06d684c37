"""What an index finds of what an exact search finds, how fast, and in how many bytes."""

import time
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Float32
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval.nearest import as_float32, bounded_threads, nearest, without_rows

AS_NEAR = 1e-6  # similarities no further apart, of 1 or relative, are ties: float32 added up in another order


@dataclass(frozen=True)
class IndexFigures:
    """An index beside exact search."""

    recall: float  # share of the `at` found that are as near as the exact ones
    at: int
    queries: int
    milliseconds: float  # a query, one after the other
    bytes: int


def measure(
    index: Any,
    values: Float[np.ndarray, "N C"],
    queries: Float[np.ndarray, "Q _"] | None = None,
    at: int = 10,
    sample: int = 1000,
    timed: int = 100,
) -> IndexFigures:
    """Recall against exact search, bytes, and the time of a query.

    An image counts as found where its similarity reaches that of the last one of the exact result, so that of exact
    duplicates any will do.

    Args:
        index: of Faiss, over the values.
        values: that it was built of; a memory map is read in blocks.
        queries: held out; None samples rows of the values, each left out of its own results by its index.
        at: results of a query, cut to the gallery.
        sample, timed: most queries that are searched, and that are timed.
    Raises:
        DistapError: there is nothing to search, or the queries have other dimensions.
    """
    if queries is None:
        own = np.sort(permutation(len(values), 1)[:sample]).astype(np.int64)
        asked = as_float32(values[own], 0, "sampled descriptor")
    else:
        own, asked = None, as_float32(queries[np.sort(permutation(len(queries), 1)[:sample])], 0, "query")
    at = min(at, len(values) - (own is not None))
    if at < 1 or not len(asked):
        raise DistapError(f"recall: {len(asked)} queries against {len(values)} descriptors leave nothing to find")
    exact, rows = nearest(asked, values, at + (own is not None))
    bounded_threads()
    found, found_rows = index.search(asked, at + (own is not None))
    if own is not None:
        exact, _ = without_rows(exact, rows, own)
        found, found_rows = without_rows(found, found_rows, own)
    last = exact[:, -1:] - AS_NEAR * np.maximum(np.abs(exact[:, -1:]), 1)
    right = (_similarities(asked, values, found_rows) >= last) & (found_rows >= 0)
    started = time.perf_counter()
    for row in range(min(timed, len(asked))):
        index.search(asked[row : row + 1], at)
    seconds = time.perf_counter() - started
    return IndexFigures(
        recall=float(right.mean()),
        at=at,
        queries=len(asked),
        milliseconds=1000 * seconds / min(timed, len(asked)),
        bytes=bytes_of(index),
    )


def bytes_of(index: Any) -> int:
    """Size of the index's file, without writing it."""
    total = 0

    def count(piece: bytes) -> int:
        nonlocal total
        total += len(piece)
        return len(piece)

    writer = faiss.PyCallbackIOWriter(count)  # type: ignore[attr-defined]  # its annotations lack it
    faiss.write_index(index, writer)
    del writer  # what it still holds is written when it goes
    return total


def _similarities(
    queries: Float32[np.ndarray, "Q C"], values: NDArray[Any], rows: NDArray[np.int64]
) -> Float32[np.ndarray, "Q k"]:
    near = np.asarray(values[np.maximum(rows, 0)], np.float32)
    return np.asarray(np.einsum("qc,qkc->qk", queries, near), np.float32)
