"""Refine descriptors between extraction and ranking: whitening, augmentation, query expansion, re-ranking."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.nearest import as_float32, nearest
from distap.retrieval.reranking import Reranker, reranked_heads
from distap.retrieval.whitening import Whitening

BLOCK_NUMBERS = 2**24  # numbers of the neighbours held in float32 at once: 64 MB


@dataclass(frozen=True)
class Expansion:
    """Move descriptors towards their neighbours (αQE, Radenović et al. 2018): `normalise(q + Σ_k max(s_k, 0)^α d_k)`.

    Args:
        neighbours: K, searched in the whole gallery.
        power: α; 0 weighs all neighbours alike, which is average query expansion (Chum et al. 2007).
    Raises:
        DistapError: a setting is negative or not finite.
    """

    neighbours: int = 10
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.neighbours < 0 or not 0 <= self.power < np.inf:
            raise DistapError(f"{self}: expected neighbours and power of at least 0")

    def apply(
        self, queries: Float[np.ndarray, "Q C"], gallery: Float[np.ndarray, "N _"], same: bool = False
    ) -> NDArray[Any]:
        """Expanded queries (Q, C) in a new array of their dtype.

        Args:
            queries: of length 1.
            gallery: (N, C) of length 1; a memory map is read in blocks.
            same: query i is row i of the gallery, and not its own neighbour. With the gallery as queries this is
                database-side augmentation (Turcot and Lowe 2009), an exact search of N² C multiplications.
        """
        similarities, rows = nearest(queries, gallery, self.neighbours, same)
        result = np.empty(queries.shape, queries.dtype)
        weights = np.maximum(similarities, 0) ** np.float32(self.power)
        height = max(BLOCK_NUMBERS // max(rows.shape[1] * queries.shape[1], 1), 1)
        for start in range(0, len(queries), height):
            some = slice(start, start + height)
            near = gallery[rows[some]].astype(np.float32)
            moved = as_float32(queries[some], start, "query")
            moved = moved + np.einsum("qk,qkc->qc", weights[some], near, optimize=True)
            length = np.linalg.norm(moved, axis=1, keepdims=True)
            result[some] = moved / np.maximum(length, np.finfo(np.float32).tiny)
        return result


@dataclass(frozen=True)
class Refinement:
    """Parts applied in the order of the fields; None skips a part.

    Args:
        whitening: of queries and gallery.
        augment: database-side augmentation, an exact search of the whole gallery for each of its images.
        expand: expansion of the queries by their neighbours in the refined gallery.
        rerank: a new order of each query's first `head` images.
        head: K.
    """

    whitening: Whitening | None = None
    augment: Expansion | None = None
    expand: Expansion | None = None
    rerank: Reranker | None = None
    head: int = 100

    @property
    def parts(self) -> dict[str, str]:
        """Field and printed name of each part that is not None."""
        names = {
            "whitening": "whitening",
            "augment": "augmentation",
            "expand": "query expansion",
            "rerank": "" if self.rerank is None else self.rerank.name,
        }
        return {field: name for field, name in names.items() if getattr(self, field) is not None}

    @property
    def name(self) -> str:
        """Names of the parts, joined by plus signs, or `plain` if there are none."""
        return " + ".join(self.parts.values()) or "plain"

    def variants(self) -> Iterator["Refinement"]:
        """Yield no refinement, each part by itself, and all parts together."""
        yield PLAIN
        if len(self.parts) > 1:
            for kept in self.parts:
                dropped: dict[str, Any] = {part: None for part in self.parts if part != kept}
                yield replace(self, **dropped)
        if self.parts:
            yield self

    def apply(
        self, queries: NDArray[Any], gallery: NDArray[Any], same: bool = False
    ) -> tuple[NDArray[Any], NDArray[Any], Int64[Tensor, "Q K"] | None]:
        """Refine queries and gallery. Arrays that do not change are returned as they are.

        Args:
            queries: (Q, C) of length 1.
            gallery: (N, C) of length 1, possibly a memory map, which is read in blocks.
            same: query i is row i of the gallery; it is neither its own neighbour nor in its own head.
        Returns:
            Queries (Q, D), gallery (N, D), and the gallery rows that come first for each query, or None.
        """
        if self.whitening is not None:
            queries = self.whitening.apply(queries)
            gallery = queries if same else self.whitening.apply(gallery)
        if self.augment is not None:
            gallery = self.augment.apply(gallery, gallery, same=True)
        if same:
            queries = gallery
        if self.expand is not None:
            queries = self.expand.apply(queries, gallery, same)
        head = None
        if self.rerank is not None:
            head = reranked_heads(self.rerank, queries, gallery, self.head, same)
        return queries, gallery, head


PLAIN = Refinement()
