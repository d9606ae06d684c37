"""Find the nearest descriptors of a gallery by exact search, with memory for little more than the result."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64

from distap.errors import DistapError
from distap.retrieval.row_blocks import Descriptors, finite, require_same_dimensions, row_blocks

GPU_RESULTS = 2048  # most for a query that Faiss finds on a GPU
SORTED_QUERIES = 1024  # queries whose results are sorted at once


def installed_faiss() -> Any:
    """Return the module of Faiss, which only search needs. Raise a DistapError if it is missing."""
    try:
        import faiss
        import faiss.contrib.exhaustive_search
    except ImportError as error:
        remedy = "pip install 'distap[cpu]', or 'distap[gpu]' for NVIDIA GPUs"
        raise DistapError(f"the search for neighbours needs Faiss: {remedy} ({error})") from error
    return faiss


def nearest(
    queries: Descriptors, gallery: Descriptors, k: int, exclude_self: bool = False
) -> tuple[Float32[np.ndarray, "Q k"], Int64[np.ndarray, "Q k"]]:
    """Return similarities and rows of each query's k nearest gallery descriptors by inner product, best first.

    Among equal similarities, the lower row comes first. Numbers of any float type are compared in float32. A build
    of Faiss for GPUs searches on all GPUs that it sees.

    Args:
        gallery: (N, C); a memory map is read once, in blocks.
        k: at most the size of the gallery; a larger k is reduced.
        exclude_self: query i is row i of the gallery. Remove it by its index, not by its similarity.
    """
    require_same_dimensions(queries, gallery)
    if exclude_self and len(queries) > len(gallery):
        raise DistapError(f"{len(queries)} queries cannot be rows of a gallery of {len(gallery)}")
    kept = max(min(k, len(gallery) - exclude_self), 0)
    wanted = kept + exclude_self
    if not kept or not len(queries):
        return np.zeros((len(queries), kept), np.float32), np.zeros((len(queries), kept), np.int64)
    bounded_threads()
    faiss = installed_faiss()
    asked = finite(queries[:], 0, "query")
    blocks = (block for _, block in row_blocks(gallery))
    gpus = -1 if wanted <= GPU_RESULTS else 0  # -1: all
    search = faiss.contrib.exhaustive_search.knn_ground_truth
    similarities, rows = search(asked, blocks, wanted, faiss.METRIC_INNER_PRODUCT, ngpu=gpus)
    for start in range(0, len(asked), SORTED_QUERIES):  # Faiss leaves the order of ties open
        some = slice(start, start + SORTED_QUERIES)
        order = np.lexsort((rows[some], -similarities[some]), axis=1)
        similarities[some] = np.take_along_axis(similarities[some], order, axis=1)
        rows[some] = np.take_along_axis(rows[some], order, axis=1)
    return without_rows(similarities, rows, np.arange(len(queries))) if exclude_self else (similarities, rows)


def without_rows(
    similarities: Float32[np.ndarray, "Q K"], rows: Int64[np.ndarray, "Q K"], own: Int64[np.ndarray, " Q"]
) -> tuple[Float32[np.ndarray, "Q K-1"], Int64[np.ndarray, "Q K-1"]]:
    """Remove row own[q] from the results of query q, or the last result if that row is not among them."""
    drop = rows == own[:, None]
    drop[~drop.any(axis=1), -1] = True
    shape = (len(rows), rows.shape[1] - 1)
    return similarities[~drop].reshape(shape), rows[~drop].reshape(shape)


def bounded_threads() -> None:
    """Limit Faiss to as many threads as torch, so that ranks on one machine share its cores."""
    installed_faiss().omp_set_num_threads(torch.get_num_threads())
