"""Expansion: a descriptor moved towards its nearest ones, for queries and for a whole gallery."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.nearest import as_float32, nearest

BLOCK_NUMBERS = 2**24  # of the neighbours in float32 at once: 64 MB


def expand_queries(
    queries: Float[np.ndarray, "Q C"],
    gallery: Float[np.ndarray, "N _"],
    neighbours: int = 10,
    power: float = 2.0,
    exclude_self: bool = False,
) -> NDArray[Any]:
    """Expanded queries (αQE, Radenović et al. 2018): `normalise(q + Σ_k max(s_k, 0)^power d_k)`, (Q, C).

    A power of 0 weighs all neighbours alike: average query expansion (Chum et al. 2007).

    Args:
        queries: of length 1.
        gallery: (N, C) of length 1; a memory map is read in blocks.
        neighbours: K of each query, from the whole gallery.
        power: α of the similarities.
        exclude_self: query i is row i of the gallery, and no neighbour of its own.
    Returns:
        A new array, of the queries' dtype.
    Raises:
        DistapError: a setting is no use, the shapes do not fit, or a number is not finite.
    """
    if neighbours < 0 or not 0 <= power < np.inf:
        raise DistapError(f"expansion: {neighbours} neighbours to the power {power:g}; expected both at least 0")
    similarities, rows = nearest(queries, gallery, neighbours, exclude_self)
    return _moved(queries, gallery, similarities, rows, power)


def augment_gallery(gallery: Float[np.ndarray, "N C"], neighbours: int = 10, power: float = 2.0) -> NDArray[Any]:
    """The gallery with each descriptor moved towards its neighbours (Turcot and Lowe 2009), (N, C).

    As `expand_queries` does, each descriptor left out of its own neighbours by its index. An exact search of all
    for all: N² C multiplications.
    """
    return expand_queries(gallery, gallery, neighbours, power, exclude_self=True)


def _moved(
    queries: NDArray[Any],
    gallery: NDArray[Any],
    similarities: NDArray[np.float32],
    rows: NDArray[np.int64],
    power: float,
) -> NDArray[Any]:
    result = np.empty(queries.shape, queries.dtype)
    weights = np.maximum(similarities, 0) ** np.float32(power)
    height = max(BLOCK_NUMBERS // max(rows.shape[1] * queries.shape[1], 1), 1)
    for start in range(0, len(queries), height):
        some = slice(start, start + height)
        moved = as_float32(queries[some], start, "query")
        moved = moved + np.einsum("qk,qkc->qc", weights[some], gallery[rows[some]].astype(np.float32), optimize=True)
        length = np.linalg.norm(moved, axis=1, keepdims=True)
        result[some] = moved / np.maximum(length, np.finfo(np.float32).tiny)
    return result
