"""Search a gallery, by an index of Faiss or exactly, among all images or those of some columns."""

from __future__ import annotations  # `help` shows the types as they are written here

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet, Networks, Texts
from distap.retrieval.filters import Cell, ImageColumns, Where
from distap.retrieval.row_blocks import (
    Descriptors,
    TakenRows,
    given_rows,
    installed_faiss,
    nearest,
    on_device,
)
from distap.storage.names import Names

# A filter that leaves at most so many rows is searched exactly.
EXACT_ROWS = 20_000
# hits that are looked at for each group that is wanted, at first and after each lack of groups
HITS_OF_A_GROUP = 4

Ranked = tuple[Float32[np.ndarray, "Q k"], Int64[np.ndarray, "Q k"]]


class Hit(NamedTuple):
    """A hit: an image that a search found."""

    key: str
    class_name: str  # "" for none
    similarity: float  # approximate if the index stores codes
    row: int  # -1 if it comes from a store
    network: str = ""  # that described it, if the index has images of several
    columns: dict[str, Cell] | MappingProxyType[str, Cell] = MappingProxyType({})


class FlatRows:
    """Exact search over rows (N, C), of which a mapped file is shared by all processes."""

    def __init__(self, values: Descriptors) -> None:
        self.values = values
        self.ntotal, self.d = values.shape

    def search(self, queries: Float32[np.ndarray, "Q C"], k: int) -> Ranked:
        faiss = installed_faiss()
        if isinstance(self.values, np.ndarray) and self.values.dtype == np.float32:
            # Faiss takes no subclass, such as a memory map, once another package has imported
            # faiss.contrib.torch_utils.
            rows = self.values.view(np.ndarray)
            ranked: Ranked = faiss.knn(queries, rows, k, faiss.METRIC_INNER_PRODUCT)
            return ranked
        return nearest(queries, self.values, k)


@dataclass(frozen=True, eq=False)
class SearchIndex:
    """A gallery that several threads can search at once."""

    index: Any  # of Faiss, or FlatRows; a lock lets one search in, which uses all threads
    images: DescriptorSet
    # contents of about.json, such as `index` (kind, factory string)
    about: dict[str, Any]
    # (N,) ascending: the number of each row in `index`; None if it is the row
    ids: NDArray[np.int64] | None = None
    generation: str = ""  # name of the folder that it was read from
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def keys(self) -> Texts:
        return self.images.keys

    @property
    def classes(self) -> Texts:
        return self.images.classes

    @property
    def described_by(self) -> DescribedBy:
        """Return how images were described, by the last of several networks."""
        return self.images.described_by

    @property
    def makers(self) -> tuple[DescribedBy, ...]:
        return self.images.makers

    @property
    def data(self) -> str:
        return self.images.data

    @property
    def networks(self) -> Networks | None:
        return self.images.networks

    @cached_property
    def columns(self) -> ImageColumns:
        return ImageColumns(self.images)

    def search(
        self, descriptors: Any, k: int, *, where: Where = None, group: str | None = None
    ) -> list[list[Hit]]:
        """Return the k most similar images per query, best first; fewer if the index finds no more.

        Args:
            descriptors: (Q, C) of length 1, or (C,) of one query; tensors, arrays or lists.
            where: rank only images for which this holds: texts such as `price<=50`, or a dict such
                as {"category": "shoes", "size": [38, 39], "price": {"<=": 50}}.
            group: a column; return the best image of each of its values.
        Raises:
            DistapError: the dimensions differ, or a column is unknown.
        """
        any_length = self.about.get("index", {}).get("dot_product", False)
        descriptors = given_rows(descriptors, "query", any_length, single=True)
        if descriptors.shape[1] != self.index.d:
            raise DistapError(
                "descriptors.wrong_dimensions",
                f"the index of {self.data} is of {self.index.d} dimensions, the query of"
                f" {descriptors.shape[1]}: another network described it",
            )
        similarities, rows = self.ranked(on_device(descriptors).numpy(), k, where, group)
        return [
            [
                self.hit(row, similarity)
                for row, similarity in zip(query_rows, query_similarities, strict=True)
                if row >= 0  # Faiss fills up with -1
            ]
            for query_rows, query_similarities in zip(
                rows.tolist(), similarities.tolist(), strict=True
            )
        ]

    def hit(self, row: int, similarity: float) -> Hit:
        return Hit(
            key=str(self.keys[row]),
            class_name=str(self.classes[row]),
            similarity=similarity,
            row=row,
            network="" if self.networks is None else self.networks.name(row),
            columns=self.columns.cells(row),
        )

    def ranked(
        self,
        queries: Float32[np.ndarray, "Q C"],
        k: int,
        where: Where = None,
        group: str | None = None,
    ) -> Ranked:
        """Return similarities and rows of the hits of `search`; the row is -1 where there is none.

        Rows of a filter, and groups, are as many as there are: where the index finds fewer, all
        descriptors are compared.
        """
        rows = self.columns.rows(where)
        groups = None if group is None else self.columns.groups(group)
        available = len(self) if rows is None else len(rows)
        if groups is not None:
            count = int(groups.max()) + 1 if rows is None else len(np.unique(groups[rows]))
            k = min(k, count)
        k = min(k, available)
        if k < 1 or not len(queries):
            return np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
        wanted = k if groups is None else min(HITS_OF_A_GROUP * k, available)
        # The best of k groups may lie anywhere in the order of images, so look further and further
        # until there are k. For k = 3, and groups A to C:
        #
        #     hits        A1 A2 A3 B1 A4 A5 | A6 B2 A7 C1 ...
        #     kept        A1       B1       |          C1
        #     wanted = 6 finds two groups   | 4 times as many find the third
        #
        # An index that can find no more, since its lists or its graph end there, gives way to exact
        # search. The loop ends: with all images in view, all groups are.
        is_exact = False
        while True:
            # Faiss has threads of its own for one search, so two at a time would only share the
            # cores. The lock is free between two rounds, and others need not wait for all of them.
            with self._lock:
                similarities, numbers = self._nearest(queries, wanted, rows, is_exact)
            if groups is None:
                return similarities, numbers
            best = _best_of_groups(similarities, numbers, groups, k)
            if (best[1] >= 0).all():
                return best
            is_exact |= bool((numbers < 0).any())
            wanted = min(HITS_OF_A_GROUP * wanted, available)

    def _nearest(
        self,
        queries: Float32[np.ndarray, "Q C"],
        k: int,
        rows: NDArray[np.int64] | None,
        is_exact: bool,
    ) -> Ranked:
        """Return the k nearest of `rows`, or all; exactly if rows are few, or some are missed."""
        faiss = installed_faiss()
        values = self.images.descriptors
        if rows is None and is_exact:
            return nearest(queries, values, k)
        if rows is None:
            similarities, numbers = self.index.search(queries, k)
            return similarities, self._rows_of(numbers)
        # A graph or lists of few rows that fulfil a condition would be searched almost in vain, and
        # so few are compared in no time.
        parameters = None
        if not is_exact and len(rows) > EXACT_ROWS:
            ids = rows if self.ids is None else self.ids[rows]
            parameters = _selecting(faiss, self.index, ids)
        if parameters is not None:
            # faiss.contrib.torch_utils, which other packages import, puts a function without
            # parameters in place of `search`, and keeps it under this name.
            search = getattr(self.index, "search_numpy", self.index.search)
            similarities, numbers = search(queries, k, params=parameters)
            if (numbers >= 0).all():
                return similarities, self._rows_of(numbers)
        # Many rows are read from the map in blocks; few are copied, which Faiss compares at once.
        chosen: Any = TakenRows(values, rows)
        if len(rows) <= EXACT_ROWS:
            chosen = np.asarray(chosen[:], np.float32)
        similarities, places = FlatRows(chosen).search(queries, k)
        return similarities, rows[places]

    def _rows_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of an index's numbers; -1 stays."""
        # Numbers ascend with the rows, since new ones are only added at the end.
        rows = numbers
        if self.ids is not None:
            rows = np.where(numbers < 0, -1, np.searchsorted(self.ids, numbers))
        if rows.max() >= len(self):
            raise DistapError(
                "index.damaged",
                f"the index of {self.data} names an image {rows.max()} of {len(self)}; index it"
                " again",
            )
        return rows

    def row_of(self, key: str) -> int:
        if not self.has(key):
            raise DistapError(
                "index.no_such_key", f"the index of {self.data} has no image with the key {key!r}"
            )
        return self.rows[self._names.known_as(key)]

    def rows_of(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Return (n,) the row of each key in any Unicode form, -1 for one that the index lacks."""
        rows = [self.rows.get(self._names.known_as(key), -1) for key in keys]
        return np.array(rows, np.int64)

    def has(self, key: str) -> bool:
        """Return whether an image has this key, in any Unicode form."""
        return self._names.known_as(key) in self.rows

    def descriptor_of(self, key: str) -> Float32[np.ndarray, " C"]:
        """Return the descriptor of an image."""
        return np.array(self.images.descriptors[self.row_of(key)], np.float32)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the row of each image by its key."""
        return {key: row for row, key in enumerate(self.keys.tolist())}

    @cached_property
    def _names(self) -> Names:
        return Names(self.rows)


def _selecting(faiss: Any, index: Any, ids: NDArray[np.int64]) -> Any:
    """Return parameters by which an index searches these numbers alone; None if it cannot."""
    if isinstance(index, faiss.IndexPreTransform):
        inner = _selecting(faiss, faiss.downcast_index(index.index), ids)
        return inner and faiss.SearchParametersPreTransform(index_params=inner)
    if not isinstance(index, faiss.IndexIVF | faiss.IndexHNSW):
        return None
    # Packed codes are scored in blocks, whatever is selected.
    if isinstance(index, faiss.IndexIVFFastScan):
        return None
    # One bit for each number up to the highest, so a test costs the same for any filter. A table of
    # the numbers themselves would be searched for each image that the index comes by.
    chosen = np.zeros(int(ids[-1]) + 1, np.bool_)
    chosen[ids] = True
    selector = faiss.IDSelectorBitmap(np.packbits(chosen, bitorder="little"))
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
    return faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)


def _best_of_groups(
    similarities: NDArray[np.float32],
    rows: NDArray[np.int64],
    groups: NDArray[np.int64],
    k: int,
) -> Ranked:
    """Return the first hit of each of the first k groups of each query; -1 if they are fewer."""
    best = np.zeros((len(rows), k), np.float32)
    best_rows = np.full((len(rows), k), -1, np.int64)
    for query, hits in enumerate(rows):
        hits = hits[hits >= 0]  # they stand at the end
        _, first = np.unique(groups[hits], return_index=True)
        places = np.sort(first)[:k]
        best[query, : len(places)] = similarities[query, places]
        best_rows[query, : len(places)] = hits[places]
    return best, best_rows
