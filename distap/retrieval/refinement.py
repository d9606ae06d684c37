"""Refine descriptors between extraction and ranking: whitening, augmentation, query expansion, re-ranking.

Re-ranking orders the head of a query's ranking anew, by the similarities among its K images: after one exact search,
its cost does not grow with the gallery.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.row_blocks import DescriptorParts, Descriptors, finite, nearest, row_blocks
from distap.retrieval.whitening import Whitening

NEAR_NUMBERS = 2**24  # numbers of the neighbours held in float32 at once: 64 MB


@dataclass(frozen=True)
class Expansion:
    """Move descriptors towards their neighbours (αQE, Radenović et al. 2018): `normalise(q + Σ_k max(s_k, 0)^α d_k)`.

    With α = 0 all neighbours weigh alike, which is average query expansion (Chum et al. 2007). A neighbour of
    negative similarity adds nothing; the code of Revaud et al. weighs it by s^α too, which is above 0 for an even α.
    """

    neighbours: int = 10  # K, searched in the whole gallery
    power: float = 2.0  # α

    def apply(self, queries: Descriptors, gallery: Descriptors, same: bool = False) -> NDArray[Any]:
        """Return expanded queries (Q, C) in a new array of their dtype, from descriptors of length 1.

        Args:
            gallery: (N, C); a memory map is read in blocks.
            same: query i is row i of the gallery, and not its own neighbour. With the gallery as queries this is
                database-side augmentation (Turcot and Lowe 2009), an exact search of N² C multiplications.
        """
        similarities, rows = nearest(queries, gallery, self.neighbours, same)
        result = np.empty(queries.shape, queries.dtype)
        weights = np.maximum(similarities, 0) ** np.float32(self.power)
        for some, moved in row_blocks(queries, numbers=NEAR_NUMBERS // max(rows.shape[1], 1)):
            near = gallery[rows[some]].astype(np.float32)
            moved += np.einsum("qk,qkc->qc", weights[some], near, optimize=True)
            length = np.linalg.norm(moved, axis=1, keepdims=True)
            result[some] = moved / np.maximum(length, np.finfo(np.float32).tiny)
        return result


@dataclass(frozen=True)
class KReciprocal:
    """Re-rank each query's head by common neighbours (Zhong et al. 2017).

    Distances are d = (1 - s) / 2, from 0 to 1 like the Jaccard distance that they are mixed with. The authors' code
    divides by the greatest distance instead.
    """

    neighbours: int = 20  # k1: neighbours of an image that may be reciprocal
    smoothing: int = 6  # k2: neighbourhoods that are averaged, including the image's own
    original: float = 0.3  # λ: weight of the original distance

    def order(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Int64[np.ndarray, " K"]:
        """Return the new order of a query's head, as places in the old order; ties keep their order."""
        nodes = np.concatenate([query[None], head])
        distances = (1 - nodes @ nodes.T) / 2
        _, others = nearest(nodes, nodes, self.neighbours, exclude_self=True)
        near = np.concatenate([np.arange(len(nodes))[:, None], others], axis=1)  # each node, then its nearest others
        weights = np.where(_expanded_neighbourhoods(near), np.exp(-distances.astype(np.float64)), 0)  # eq. 7
        weights /= weights.sum(axis=1, keepdims=True)
        # Average over k2 neighbourhoods; only columns that overlap with node 0, the query, matter to it.
        averaged = near[:, : self.smoothing]
        weights = weights[:, weights[averaged[0]].any(axis=0)]
        smooth = sum(weights[column] for column in averaged.T) / averaged.shape[1]
        common = np.minimum(smooth, smooth[0]).sum(axis=1)
        jaccard = 1 - common / (2 - common)  # eq. 10 and 11; each neighbourhood sums to one
        mixed = (1 - self.original) * jaccard + self.original * distances[0]  # eq. 12
        return np.argsort(mixed[1:], kind="stable")


def reranked_heads(
    reranker: KReciprocal, queries: Descriptors, gallery: Descriptors, size: int, exclude_self: bool = False
) -> Int64[Tensor, "Q K"]:
    """Return each query's `size` nearest gallery rows, re-ranked, from descriptors of length 1.

    Args:
        gallery: (N, C); a memory map is read in blocks.
        size: K, at most the size of the gallery. Re-ranking holds K² numbers for one query at a time.
        exclude_self: query i is row i of the gallery, and not in its own head.
    """
    size = min(size, len(gallery) - exclude_self)
    heads = np.empty((len(queries), max(size, 0)), np.int64)
    if heads.size:
        _, found = nearest(queries, gallery, size, exclude_self)
        for row, near in enumerate(found):
            query, head = finite(queries[row : row + 1], row, "query")[0], np.asarray(gallery[near], np.float32)
            heads[row] = near[reranker.order(query, head)]
    return torch.from_numpy(heads)


@dataclass(frozen=True)
class Refinement:
    """Refinements of descriptors and rankings, applied in the order of the fields; None skips one."""

    whitening: Whitening | None = None  # of queries and gallery
    augment: Expansion | None = None  # of the gallery by itself: database-side augmentation
    expand: Expansion | None = None  # of the queries by the refined gallery
    rerank: KReciprocal | None = None
    head: int = 100  # images of each query that are re-ranked

    @property
    def name(self) -> str:
        """Names of the parts joined by plus signs, or `plain` without parts."""
        parts: dict[str, Any] = {"whitening": self.whitening, "augmentation": self.augment}
        parts |= {"query expansion": self.expand, "k-reciprocal": self.rerank}
        return " + ".join(name for name, part in parts.items() if part is not None) or "plain"

    def apply(
        self, queries: Descriptors, gallery: Descriptors, same: bool = False, distractors: Descriptors | None = None
    ) -> tuple[Descriptors, Descriptors, Int64[Tensor, "Q K"] | None]:
        """Refine queries (Q, C) and gallery (N, C) of length 1. Unchanged arrays are returned themselves.

        Args:
            same: query i is row i of the gallery; it is neither its own neighbour nor in its own head.
            distractors: (M, D) further rows, whitened already, that are found too; augmentation does not take them.
        Returns:
            Queries (Q, D), gallery (N, D), and the rows that come first for each query (distractors from N), or None.
        """
        if self.whitening is not None:
            queries = self.whitening.apply(queries)
            gallery = queries if same else self.whitening.apply(gallery)
        if self.augment is not None and distractors is not None:
            raise DistapError("distractors given as descriptors are not augmented: leave database augmentation out")
        if self.augment is not None:
            gallery = self.augment.apply(gallery, gallery, same=True)
        if same:
            queries = gallery
        every, head = gallery, None
        if distractors is not None:
            every = DescriptorParts([("gallery", gallery), ("distractors", distractors)])
        if self.expand is not None:
            queries = self.expand.apply(queries, every, same)
        if self.rerank is not None:
            head = reranked_heads(self.rerank, queries, every, self.head, same)
        return queries, gallery, head


PLAIN = Refinement()


def _is_mutual(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n k"]:
    """Return which neighbours of a node have that node among their own neighbours."""
    node, total = np.arange(len(near))[:, None], len(near)
    return np.isin(near * total + node, node * total + near)


def _expanded_neighbourhoods(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n n"]:
    """Return R*(i, k1) of each node i (eq. 3 and 4): reciprocal neighbours R(i, k1), plus those of neighbours.

    A neighbour's R(j, k1 / 2) is added if more than two thirds of it lie in R(i, k1).
    """
    total, width = near.shape
    node = np.arange(total)
    reciprocal = _is_mutual(near)
    member = np.zeros((total, total), dtype=bool)
    member[np.nonzero(reciprocal)[0], near[reciprocal]] = True
    half = near[:, : round((width - 1) / 2) + 1]
    half_reciprocal = _is_mutual(half)
    around = half[near]  # (n, k, k / 2): of each candidate
    counted = half_reciprocal[near] & reciprocal[:, :, None]
    shared = member[node[:, None, None], around] & counted
    joins = shared.sum(axis=2) > 2 / 3 * counted.sum(axis=2)
    counted &= joins[:, :, None]
    member[np.nonzero(counted)[0], around[counted]] = True
    return member
