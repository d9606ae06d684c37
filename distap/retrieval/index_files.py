"""Read, write and search a folder with a Faiss index.

Faiss trusts its files, and a damaged one can crash the process. So size and SHA-256 are compared before Faiss reads a
byte.
"""

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32

from distap.errors import DistapError
from distap.retrieval.descriptor_files import (
    ABOUT_FILE,
    CLASSES_FILE,
    DESCRIPTORS_FILE,
    KEYS_FILE,
    DescribedBy,
    DescriptorSet,
    Texts,
    read_described,
    reading,
    write_described,
)
from distap.retrieval.row_blocks import bounded_threads, given_rows, installed_faiss, on_device
from distap.storage.atomic import refuse_foreign

faiss = installed_faiss()
INDEX_FILE = "index.faiss"


class Hit(NamedTuple):
    """A hit: an image that a search found."""

    key: str
    class_name: str  # "" for none
    similarity: float  # approximate if the index stores codes
    row: int


@dataclass(frozen=True, eq=False)
class SearchIndex:
    """A gallery that several threads can search at once."""

    index: Any  # of Faiss; a lock lets one search in at a time, which uses all threads
    keys: Texts  # (N,)
    classes: Texts  # (N,)
    described_by: DescribedBy
    data: str  # path or URL of the images
    about: dict[str, Any]  # contents of about.json, such as `index` (kind, factory string) and `measured`
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def dimensions(self) -> int:
        return int(self.index.d)

    def search(self, descriptors: Any, k: int) -> list[list[Hit]]:
        """Return the k most similar images per query, best first, or fewer if the index finds no more.

        Args:
            descriptors: (Q, C) of length 1, or (C,) of one query; tensors, arrays or lists.
        """
        any_length = self.about.get("index", {}).get("dot_product", False)
        descriptors = given_rows(descriptors, "query", any_length, single=True)
        if descriptors.shape[1] != self.dimensions:
            raise DistapError(
                f"the index of {self.data} is of {self.dimensions} dimensions, the query of {descriptors.shape[1]}: "
                "another network described it"
            )
        asked, k = on_device(descriptors, torch.float32, torch.device("cpu")).numpy(), min(k, len(self))
        if k < 1 or not len(asked):
            return [[] for _ in asked]
        with self._lock:
            bounded_threads()
            similarities, rows = self.index.search(asked, k)
        if rows.max() >= len(self):
            raise DistapError(f"the index of {self.data} names an image {rows.max()} of {len(self)}; index it again")
        return [
            [
                Hit(str(self.keys[row]), str(self.classes[row]), similarity, row)
                for row, similarity in zip(*found, strict=True)
                if row >= 0
            ]
            for found in zip(rows.tolist(), similarities.tolist(), strict=True)
        ]

    def row_of(self, key: str) -> int:
        if key not in self.rows:
            raise DistapError(f"the index of {self.data} has no image with the key {key!r}")
        return self.rows[key]

    def descriptor(self, row: int) -> Float32[np.ndarray, " C"]:
        """Return an image's descriptor, approximate if the index stores codes. Some kinds raise a RuntimeError."""
        with self._lock:
            ivf = faiss.try_extract_index_ivf(self.index)
            if ivf is not None and not isinstance(self.index, faiss.IndexRefine):
                if isinstance(faiss.downcast_index(ivf), faiss.IndexIVFFastScan):  # Faiss 1.15 would crash
                    raise RuntimeError("packed codes cannot be reconstructed")
                ivf.make_direct_map()
            return np.asarray(self.index.reconstruct(row), np.float32)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the row of each image by its key."""
        return {key: row for row, key in enumerate(self.keys.tolist())}


def write_index(
    folder: Path, index: SearchIndex, descriptors: DescriptorSet, measured: dict[str, Any] | None = None
) -> None:
    """Write a folder for `read_index`. Earlier contents become invalid as soon as writing starts.

    Args:
        index: a Faiss index over all descriptors, in their order.
        measured: further entries for about.json, such as the recall.
    """
    require_free_for_index(folder)
    files = {INDEX_FILE: lambda file: faiss.write_index(index.index, file.name)}
    write_described(folder, descriptors, files, **index.about, **(measured or {}))


def require_free_for_index(folder: Path) -> None:
    """Raise a DistapError if a folder holds descriptors, whose files an index would replace, or other files."""
    if (folder / DESCRIPTORS_FILE).exists():
        raise DistapError(f"{folder}: holds descriptors; name another folder for the index")
    if not (folder / INDEX_FILE).exists():
        refuse_foreign(folder, {INDEX_FILE, KEYS_FILE, CLASSES_FILE, ABOUT_FILE})


def read_index(folder: Path) -> SearchIndex:
    """Read a folder of `write_index` into memory; raise a DistapError that names a damaged file."""
    about, described_by, keys, classes, shape = read_described(folder, INDEX_FILE, "distap index", "index it again")
    with reading(folder / INDEX_FILE, "distap index"):
        index = faiss.read_index(str(folder / INDEX_FILE))
        if (index.ntotal, index.d) != shape:
            raise ValueError(f"{index.ntotal} rows of {index.d} dimensions, but {ABOUT_FILE} says {shape}")
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError("it ranks by distances, not by similarities")
        for text in (*keys.tolist(), *classes.tolist()):
            text.encode()  # raises a ValueError for half of a surrogate pair, which no terminal or page can show
    return SearchIndex(index, keys, classes, described_by, about["data"], about)
