"""Build, write, read and search Faiss indexes over descriptors, and compare them with exact search.

A factory string such as `OPQ64,IVF4096,PQ64` lists the parts of an index from its first
transformation to its codes (https://github.com/facebookresearch/faiss/wiki/The-index-factory). A
named kind is one, with search parameters.

Faiss trusts its files, and a damaged one can crash the process. So size and SHA-256 are compared
before Faiss reads a byte.
"""

from __future__ import annotations  # `help` shows the types as they are written here

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy.typing import ArrayLike

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval import descriptor_files as files
from distap.retrieval.descriptor_files import (
    DescribedBy,
    DescriptorSet,
    Networks,
    Texts,
    read_described,
    reading,
)
from distap.retrieval.row_blocks import (
    given_rows,
    installed_faiss,
    nearest,
    on_device,
    row_blocks,
    without_rows,
)
from distap.storage.names import Names

faiss = installed_faiss()
INDEX_FILE = "index.faiss"
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


class Hit(NamedTuple):
    """A hit: an image that a search found."""

    key: str
    class_name: str  # "" for none
    similarity: float  # approximate if the index stores codes
    row: int
    network: str = ""  # that described it, if the index has images of several


@dataclass(frozen=True, eq=False)
class SearchIndex:
    """A gallery that several threads can search at once."""

    index: Any  # of Faiss; a lock lets one search in at a time, which uses all threads
    keys: Texts  # (N,)
    classes: Texts  # (N,)
    described_by: DescribedBy  # of several, the last
    data: str  # path or URL of the images
    # contents of about.json, such as `index` (kind, factory string) and `measured`
    about: dict[str, Any]
    networks: Networks | None = None  # if there are several
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def search(self, descriptors: Any, k: int) -> list[list[Hit]]:
        """Return the k most similar images per query, best first; fewer if the index finds no more.

        Args:
            descriptors: (Q, C) of length 1, or (C,) of one query; tensors, arrays or lists.
        """
        any_length = self.about.get("index", {}).get("dot_product", False)
        descriptors = given_rows(descriptors, "query", any_length, single=True)
        if descriptors.shape[1] != self.index.d:
            raise DistapError(
                "descriptors.wrong_dimensions",
                f"the index of {self.data} is of {self.index.d} dimensions, the query of"
                f" {descriptors.shape[1]}: another network described it",
            )
        queries = on_device(descriptors).numpy()
        k = min(k, len(self))
        if k < 1 or not len(queries):
            return [[] for _ in queries]
        with self._lock:
            installed_faiss()
            similarities, rows = self.index.search(queries, k)
        if rows.max() >= len(self):
            raise DistapError(
                "index.damaged",
                f"the index of {self.data} names an image {rows.max()} of {len(self)}; index it"
                " again",
            )
        networks = self.networks
        return [
            [
                Hit(
                    str(self.keys[row]),
                    str(self.classes[row]),
                    similarity,
                    row,
                    "" if networks is None else networks.name(row),
                )
                for row, similarity in zip(query_rows, query_similarities, strict=True)
                if row >= 0  # Faiss fills up with -1
            ]
            for query_rows, query_similarities in zip(
                rows.tolist(), similarities.tolist(), strict=True
            )
        ]

    def row_of(self, key: str) -> int:
        if not self.has(key):
            raise DistapError(
                "index.no_such_key", f"the index of {self.data} has no image with the key {key!r}"
            )
        return self.rows[self._names.known_as(key)]

    def has(self, key: str) -> bool:
        """Return whether an image has this key, in any Unicode form."""
        return self._names.known_as(key) in self.rows

    def descriptor(self, row: int) -> Float32[np.ndarray, " C"]:
        """Return an image's descriptor, approximate if the index stores codes.

        Raises:
            RuntimeError: this kind of index cannot reconstruct it.
        """
        with self._lock:
            ivf = faiss.try_extract_index_ivf(self.index)
            if ivf is not None and not isinstance(self.index, faiss.IndexRefine):
                # Faiss 1.15 would crash
                if isinstance(faiss.downcast_index(ivf), faiss.IndexIVFFastScan):
                    raise RuntimeError("packed codes cannot be reconstructed")
                # An inverted file finds a row's code by a map from rows to lists, which Faiss makes
                # on demand.
                ivf.make_direct_map()
            return np.asarray(self.index.reconstruct(row), np.float32)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the row of each image by its key."""
        return {key: row for row, key in enumerate(self.keys.tolist())}

    @cached_property
    def _names(self) -> Names:
        return Names(self.rows)


def write_index(folder: Path, index: SearchIndex, descriptors: DescriptorSet) -> None:
    """Write a folder for `read_index`, of an index over all descriptors, in their order."""
    require_free_for_index(folder)
    write = {INDEX_FILE: lambda file: faiss.write_index(index.index, file.name)}
    files.write_described(folder, descriptors, write, **index.about)


def require_free_for_index(folder: Path) -> None:
    """Raise a DistapError if a folder holds anything but an index whose writing was interrupted."""
    paths = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    names = {path.name for path in paths}
    if names - {INDEX_FILE, files.KEYS_FILE, files.CLASSES_FILE, files.NETWORKS_FILE}:
        raise DistapError(
            "index.folder_in_use",
            f"{folder}: {', '.join(sorted(names)[:3])} would be lost; move it, or name a new"
            " folder",
        )


def read_index(folder: Path) -> SearchIndex:
    """Read a folder of `write_index` into memory; raise a DistapError that names a damaged file."""
    about, described_by, networks, keys, classes, shape = read_described(
        folder, INDEX_FILE, "distap index", "index it again"
    )
    with reading(folder / INDEX_FILE, "distap index"):
        index = faiss.read_index(str(folder / INDEX_FILE))
        if (index.ntotal, index.d) != shape:
            raise ValueError(
                f"{index.ntotal} rows of {index.d} dimensions, but {files.ABOUT_FILE} says {shape}"
            )
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError("it ranks by distances, not by similarities")
        # A ValueError for half of a surrogate pair, which no terminal or page can show.
        "".join((*keys.tolist(), *classes.tolist())).encode()
    return SearchIndex(index, keys, classes, described_by, about["data"], about, networks)


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
        index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DistapError(
                "index.wrong_kind",
                f"{factory!r} cannot search by inner product; choose another index",
            )
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)  # it takes text
        ivf: Any = faiss.try_extract_index_ivf(index)
        sample = max(SAMPLE_ROWS, SAMPLE_ROWS_OF_A_LIST * (ivf.nlist if ivf else 0))
        if not index.is_trained:
            sample = min(sample, max(SAMPLE_NUMBERS // dimensions, 1))
            rows = np.sort(permutation(images, 0)[:sample])
            index.train(on_device(values[rows], name="sampled descriptor").numpy())
        blocks = row_blocks(values, numbers=ADDED_NUMBERS)
        total = -(-images // max(ADDED_NUMBERS // dimensions, 1))
        for _, block in track(blocks, f"indexing ({kind})", total) if track else blocks:
            index.add(block)
        index.search(on_device(values[:1]).numpy(), 1)  # Faiss checks some parameters only here
    except RuntimeError as error:
        reason = re.sub(r"^Error in .*\.cpp:\d+: (Error: '.*' failed: )?", "", str(error))
        parameters = f" with search parameters {search!r}" if search else ""
        raise DistapError(
            "index.wrong_kind",
            f"Faiss cannot build an index {factory!r}{parameters} over {images} descriptors of"
            f" {dimensions} dimensions: {reason}",
        ) from error
    return SearchIndex(
        index,
        descriptors.keys,
        descriptors.classes,
        descriptors.described_by,
        descriptors.data,
        {
            "index": {"kind": kind, "factory": factory, "search": search},
            "build_seconds": time.perf_counter() - started,
        },
        descriptors.networks,
    )


def search_index(
    descriptors: ArrayLike | torch.Tensor | Sequence[torch.Tensor],
    keys: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    kind: str = "flat",
    search: str = "",
    dot_product: bool = False,
) -> SearchIndex:
    """Build a Faiss index; `search_index(...).search(queries, k)` returns hits.

    Args:
        descriptors: (N, C) of length 1.
        keys: (N,) names of the images; None takes the numbers of the rows.
        classes: (N,) names of their classes; None for none.
        kind: `flat`, `hnsw` or a factory string of Faiss.
        search: parameters of the index, see `build_index`.
        dot_product: take descriptors of any length, and rank by the dot product.
    Raises:
        DistapError: the shapes do not fit, a descriptor is not finite or has another length, or
            Faiss cannot build such an index.
    """
    values = given_rows(descriptors, dot_product=dot_product)
    if isinstance(values, torch.Tensor):
        values = values.float().cpu().numpy()
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
