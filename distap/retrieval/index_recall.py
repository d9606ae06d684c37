"""Measure an index against exact search: recall, time of a query, and size."""

import time
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval.nearest import as_float32, bounded_threads, nearest, without_rows

SAMPLE, TIMED = 1000, 100  # queries that are searched, and of these timed, at most
TIE = 1e-6  # absolute or relative difference of similarities that float32 sums in another order may have


@dataclass(frozen=True)
class IndexFigures:
    """Recall, speed and size of an index."""

    recall: float  # share of the first `at` results that are as near as the exact ones
    at: int
    queries: int
    milliseconds: float  # for one query at a time
    bytes: int  # of the index's file


def measure_recall(
    index: Any,
    values: Float[np.ndarray, "N C"],
    queries: Float[np.ndarray, "Q _"] | None = None,
    at: int = 10,
) -> IndexFigures:
    """Compare the results of an index with those of exact search, for at most SAMPLE queries.

    An image counts as found if its similarity reaches that of the last exact result. So any of several exact
    duplicates will do.

    Args:
        index: of Faiss, over `values`.
        values: a memory map is read in blocks.
        queries: held-out queries; None samples rows of `values` and leaves each out of its own results.
        at: results of a query, at most the size of the gallery.
    Raises:
        DistapError: there is nothing to search, or the queries have other dimensions.
    """
    own = None
    if queries is None:
        own = np.sort(permutation(len(values), 1)[:SAMPLE]).astype(np.int64)
        asked = as_float32(values[own], 0, "sampled descriptor")
    else:
        asked = as_float32(queries[np.sort(permutation(len(queries), 1)[:SAMPLE])], 0, "query")
    at = min(at, len(values) - (own is not None))
    if at < 1 or not len(asked):
        raise DistapError(f"recall: {len(asked)} queries against {len(values)} descriptors leave nothing to find")
    exact, rows = nearest(asked, values, at + (own is not None))
    bounded_threads()
    found, found_rows = index.search(asked, at + (own is not None))
    if own is not None:
        exact, _ = without_rows(exact, rows, own)
        found, found_rows = without_rows(found, found_rows, own)
    # The index may store codes, so compare by the similarities of the descriptors themselves.
    near = np.asarray(values[np.maximum(found_rows, 0)], np.float32)
    similarities = np.einsum("qc,qkc->qk", asked, near)
    last = exact[:, -1:] - TIE * np.maximum(np.abs(exact[:, -1:]), 1)
    started = time.perf_counter()
    for row in range(min(TIMED, len(asked))):
        index.search(asked[row : row + 1], at)
    seconds = time.perf_counter() - started
    return IndexFigures(
        recall=float(((similarities >= last) & (found_rows >= 0)).mean()),
        at=at,
        queries=len(asked),
        milliseconds=1000 * seconds / min(TIMED, len(asked)),
        bytes=_file_bytes(index),
    )


def _file_bytes(index: Any) -> int:
    """Size of the index's file, without writing it."""
    sizes: list[int] = []

    def count(piece: bytes) -> int:
        sizes.append(len(piece))
        return len(piece)

    writer = faiss.PyCallbackIOWriter(count)  # type: ignore[attr-defined]  # missing from its annotations
    faiss.write_index(index, writer)
    del writer  # flushes its buffer
    return sum(sizes)
