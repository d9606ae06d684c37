"""Build, write, read and search Faiss indexes over descriptors, and compare them with exact search.

A factory string such as `OPQ64,IVF4096,PQ64` lists the parts of an index from its first
transformation to its codes (https://github.com/facebookresearch/faiss/wiki/The-index-factory). A
named kind is one, with search parameters.

Faiss trusts its files, and a damaged one can crash the process. So size and SHA-256 are compared
before Faiss reads a byte.
"""

from __future__ import annotations  # `help` shows the types as they are written here

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.row_blocks import (
    given_rows,
    installed_faiss,
    nearest,
    on_device,
    row_blocks,
    without_rows,
)
from distap.retrieval.searching import FlatRows, SearchIndex
from distap.retrieval.stored_index import read_index

faiss = installed_faiss()
# numbers added at once: few, so that a slowly growing graph shows its progress
ADDED_NUMBERS = 2**20
SAMPLE_NUMBERS = 2**27  # most numbers that an index is trained on: 512 MB in float32
# descriptors to train on: 256 for each of 256 codes, 64 for each list
SAMPLE_ROWS = 2**16
SAMPLE_ROWS_OF_A_LIST = 64
# queries that recall is measured with, and of these timed, at most
MEASURED = 1000
TIMED = 100
RECALL_AT = 10  # results of a query that recall is measured for
# absolute or relative difference of similarities that float32 sums in another order may have
TIE = 1e-6


# Factory string and search parameters.
KINDS = {
    "flat": ("Flat", ""),  # exact: all descriptors in float32
    # graph of neighbours (Malkov and Yashunin 2018)
    "hnsw": ("HNSW32", "efConstruction=100,efSearch=64"),
}


def build_index(
    descriptors: DescriptorSet,
    kind: str,
    search: str = "",
    track: Callable[[Iterable[Any], str, int], Iterable[Any]] | None = None,
) -> SearchIndex:
    """Train an index on a sample, then add all descriptors, read in blocks.

    Args:
        kind: one of KINDS, or a factory string of Faiss.
        search: parameters of Faiss's ParameterSpace, such as `nprobe=64,k_factor_rf=8`; they
            override the kind's.
        track: shows progress: called with the blocks, a description and their number, it yields
            the blocks.
    """
    values = descriptors.descriptors
    images, dimensions = values.shape
    if not images or not dimensions:
        raise DistapError(
            "descriptors.too_few",
            f"there is nothing to index in descriptors of shape {values.shape}",
        )
    factory, kind_search = KINDS.get(kind, (kind, ""))
    search = ",".join(filter(None, (kind_search, search)))
    started = time.perf_counter()
    installed_faiss()
    try:
        if factory == KINDS["flat"][0] and not search:
            index: Any = FlatRows(values)
            add = len
        else:
            index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
            add = index.add
        if add is not len and index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DistapError(
                "index.wrong_kind",
                f"{factory!r} cannot search by inner product; choose another index",
            )
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)  # it takes text
        if add is not len and not index.is_trained:
            ivf: Any = faiss.try_extract_index_ivf(index)
            sample = max(SAMPLE_ROWS, SAMPLE_ROWS_OF_A_LIST * (ivf.nlist if ivf else 0))
            sample = min(sample, max(SAMPLE_NUMBERS // dimensions, 1))
            rows = np.sort(permutation(images, 0)[:sample])
            index.train(on_device(values[rows], name="sampled descriptor").numpy())
        blocks = row_blocks(values, numbers=ADDED_NUMBERS)
        total = -(-images // max(ADDED_NUMBERS // dimensions, 1))
        for _, block in track(blocks, f"indexing ({kind})", total) if track else blocks:
            add(block)
        index.search(on_device(values[:1]).numpy(), 1)  # Faiss checks some parameters only here
    except RuntimeError as error:
        reason = re.sub(r"^Error in .*\.cpp:\d+: (Error: '.*' failed: )?", "", str(error))
        parameters = f" with search parameters {search!r}" if search else ""
        raise DistapError(
            "index.wrong_kind",
            f"Faiss cannot build an index {factory!r}{parameters} over {images} descriptors of"
            f" {dimensions} dimensions: {reason}",
        ) from error
    about = {
        "index": {"kind": kind, "factory": factory, "search": search},
        "build_seconds": time.perf_counter() - started,
    }
    return SearchIndex(index, descriptors, about)


def search_index(
    descriptors: ArrayLike | torch.Tensor | Sequence[torch.Tensor] | Path,
    keys: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    kind: str = "flat",
    search: str = "",
    dot_product: bool = False,
) -> SearchIndex:
    """Build a Faiss index, or open one; `search_index(...).search(queries, k)` returns hits.

    An index that is opened stays in its files, which all processes share.

    Args:
        descriptors: (N, C) of length 1. Or, without other arguments, the folder of an index that
            `distap index` wrote, of which the current generation is opened.
        keys: (N,) names of the images; None takes the numbers of the rows.
        classes: (N,) names of their classes; None for none.
        kind: `flat`, `hnsw` or a factory string of Faiss.
        search: parameters of the index, see `build_index`.
        dot_product: take descriptors of any length, and rank by the dot product.
    Raises:
        DistapError: the shapes do not fit, a descriptor is not finite or has another length, Faiss
            cannot build such an index, or the folder has no index or a damaged one.
    """
    if isinstance(descriptors, str | Path):
        names_images = keys is not None or classes is not None
        if names_images or (kind, search, dot_product) != ("flat", "", False):
            raise DistapError(
                "index.opened_as_it_is",
                f"{descriptors}: an index that is opened has its keys, classes and kind: give the"
                " folder alone",
            )
        return read_index(Path(descriptors))
    values = given_rows(descriptors, dot_product=dot_product)
    if isinstance(values, torch.Tensor):
        values = values.float().cpu().numpy()
    values = np.asarray(values, np.float32)
    names = np.arange(len(values)).astype(str) if keys is None else np.array(keys, dtype=str)
    of_class = np.full(len(values), "") if classes is None else np.array(classes, dtype=str)
    descriptor_set = DescriptorSet(
        values, names, of_class, DescribedBy(network="", sizing=""), "descriptors in memory"
    )
    built = build_index(descriptor_set, kind, search)
    built.about["index"]["dot_product"] = dot_product
    return built


def measure_recall(index: Any, values: Float[np.ndarray, "N C"]) -> dict[str, Any]:
    """Compare an index with exact search, for at most MEASURED of its rows, each without itself.

    An image counts as found if its similarity reaches that of the last exact result. So any of
    several exact duplicates will do.

    Args:
        index: a Faiss index over `values`.
        values: a memory map is read in blocks.
    Returns:
        recall: share of the first `at` results that are as near as the exact ones.
        at, queries: numbers of results of a query, and of queries.
        milliseconds: time of one query alone.
    """
    sampled = np.sort(permutation(len(values), 1)[:MEASURED]).astype(np.int64)
    queries = on_device(values[sampled], name="sampled query").numpy()
    at = min(RECALL_AT, len(values) - 1)
    if at < 1 or not len(queries):
        raise DistapError(
            "descriptors.too_few",
            f"recall: {len(queries)} queries against {len(values)} descriptors leave nothing to"
            " find",
        )
    # One result more than wanted, since each query is in the index and finds itself.
    exact, _ = without_rows(*nearest(queries, values, at + 1), sampled)
    installed_faiss()
    approximate, rows = index.search(queries, at + 1)
    _, found_rows = without_rows(approximate, rows, sampled)
    # The index may store codes, so compare by the similarities of the descriptors themselves.
    near = np.asarray(values[np.maximum(found_rows, 0)], np.float32)
    similarities = np.einsum("qc,qkc->qk", queries, near)
    last = exact[:, -1:] - TIE * np.maximum(np.abs(exact[:, -1:]), 1)
    started = time.perf_counter()
    timed = min(TIMED, len(queries))
    for row in range(timed):
        index.search(queries[row : row + 1], at)
    seconds = time.perf_counter() - started
    return {
        "recall": float(((similarities >= last) & (found_rows >= 0)).mean()),
        "at": at,
        "queries": len(queries),
        "milliseconds": 1000 * seconds / timed,
    }
