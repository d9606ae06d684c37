"""Refine descriptors between extraction and ranking: augmentation, query expansion, re-ranking.

Re-ranking orders the head of a query's ranking anew, by the similarities among its K images: after
one exact search, its cost does not grow with the gallery.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.row_blocks import DescriptorParts, Descriptors, nearest, on_device, row_blocks

NEAR_NUMBERS = 2**24  # numbers of the neighbours held in float32 at once: 64 MB


def expanded(
    queries: Descriptors, gallery: Descriptors, neighbours: int, power: float, same: bool = False
) -> NDArray[Any]:
    """Move queries towards their neighbours (αQE, Radenović et al. 2018): `normalise(q + Σ_k
    max(s_k, 0)^α d_k)`.

    With α = 0 all neighbours weigh alike, which is average query expansion (Chum et al. 2007). A
    neighbour of negative similarity adds nothing; the code of Revaud et al. weighs it by s^α too,
    which is above 0 for an even α.

    Args:
        queries: (Q, C) of length 1.
        gallery: (N, C) of length 1; a memory map is read in blocks.
        neighbours: K, searched in the whole gallery.
        power: α.
        same: query i is row i of the gallery, and not its own neighbour. With the gallery as
            queries this is database-side augmentation (Turcot and Lowe 2009), an exact search of
            N² C multiplications.
    Returns:
        A new array (Q, C) of the queries' dtype.
    """
    similarities, rows = nearest(queries, gallery, neighbours, same)
    result = np.empty(queries.shape, queries.dtype)
    weights = np.maximum(similarities, 0) ** np.float32(power)
    for places, moved in row_blocks(queries, numbers=NEAR_NUMBERS // max(rows.shape[1], 1)):
        near = gallery[rows[places]].astype(np.float32)
        moved += np.einsum("qk,qkc->qc", weights[places], near, optimize=True)
        length = np.linalg.norm(moved, axis=1, keepdims=True)
        result[places] = moved / np.maximum(length, np.finfo(np.float32).tiny)
    return result


def reranked_heads(
    queries: Descriptors,
    gallery: Descriptors,
    size: int,
    same: bool = False,
    neighbours: int = 20,
    smoothing: int = 6,
    original: float = 0.3,
) -> Int64[Tensor, "Q K"]:
    """Return each query's `size` nearest gallery rows, re-ranked by common neighbours (Zhong et al.
    2017).

    Distances are d = (1 - s) / 2, from 0 to 1 like the Jaccard distance that they are mixed with.
    The authors' code divides by the greatest distance instead. Ties keep their order.

    Args:
        queries: (Q, C) of length 1.
        gallery: (N, C) of length 1; a memory map is read in blocks.
        size: K, at most the size of the gallery. Re-ranking holds K² numbers for one query at a
            time.
        same: query i is row i of the gallery, and not in its own head.
        neighbours: k1, of an image that may be reciprocal.
        smoothing: k2, neighbourhoods that are averaged, including the image's own.
        original: λ, weight of the original distance.
    """
    _, heads = nearest(queries, gallery, size, same)
    for row, head in enumerate(heads if heads.shape[1] else ()):
        query = on_device(queries[row : row + 1], first_row=row, name="query").numpy()
        nodes = np.concatenate([query, np.asarray(gallery[head], np.float32)])
        distances = (1 - nodes @ nodes.T) / 2
        _, near_rows = nearest(nodes, nodes, neighbours, exclude_self=True)
        # each node, then its nearest others
        near = np.concatenate([np.arange(len(nodes))[:, None], near_rows], axis=1)
        # eq. 7
        weights = np.where(_expanded_neighbourhoods(near), np.exp(-distances.astype(np.float64)), 0)
        weights /= weights.sum(axis=1, keepdims=True)
        # Average the weights of each node over its k2 nearest. Only distances to node 0, the query,
        # are wanted, and its common weight with any node is 0 in columns where its own are 0.
        averaged = near[:, :smoothing]
        weights = weights[:, weights[averaged[0]].any(axis=0)]
        smooth = sum(weights[column] for column in averaged.T) / averaged.shape[1]
        common = np.minimum(smooth, smooth[0]).sum(axis=1)
        jaccard = 1 - common / (2 - common)  # eq. 10 and 11; each neighbourhood sums to one
        mixed = (1 - original) * jaccard + original * distances[0]  # eq. 12
        heads[row] = head[np.argsort(mixed[1:], kind="stable")]
    return torch.from_numpy(heads)


@dataclass(frozen=True)
class Refinement:
    """Refinements of descriptors and rankings, applied in the order of the fields.

    None skips one.
    """

    # power α of the expansion of the gallery by itself: database-side augmentation
    augment: float | None = None
    expand: float | None = None  # power α of the expansion of the queries by the augmented gallery
    neighbours: int = 10  # of both expansions
    rerank: int | None = None  # neighbours k1 of k-reciprocal re-ranking
    head: int = 100  # images of each query that are re-ranked

    @property
    def names(self) -> list[str]:
        """Return which refinements are on, as results name them."""
        settings = {
            "augmentation": self.augment,
            "query expansion": self.expand,
            "k-reciprocal": self.rerank,
        }
        return [name for name, setting in settings.items() if setting is not None]

    def apply(
        self,
        queries: Descriptors,
        gallery: Descriptors,
        distractors: Descriptors | None = None,
        *,
        same: bool,
    ) -> tuple[Descriptors, Descriptors, Int64[Tensor, "Q K"] | None]:
        """Refine queries (Q, C) and gallery (N, C) of length 1. Unchanged arrays are returned
        themselves.

        Args:
            distractors: (M, C) further rows that are found too; augmentation does not take them.
            same: query i is the image of row i of the gallery, and neither its own neighbour nor in
                its own head. Then the queries are augmented too, among themselves: another network
                may have described the gallery.
        Returns:
            Queries (Q, C), gallery (N, C), and the rows that come first for each query (distractors
            from N), or None.
        """
        is_itself = queries is gallery
        if self.augment is not None:
            if distractors is not None:
                raise DistapError(
                    "evaluation.distractors_augmented",
                    "distractors given as descriptors are not augmented: leave database"
                    " augmentation out",
                )
            gallery = expanded(gallery, gallery, self.neighbours, self.augment, same=True)
            if same and not is_itself:
                queries = expanded(queries, queries, self.neighbours, self.augment, same=True)
        if is_itself:
            queries = gallery
        searched = gallery
        head = None
        if distractors is not None:
            searched = DescriptorParts([("gallery", gallery), ("distractors", distractors)])
        if self.expand is not None:
            queries = expanded(queries, searched, self.neighbours, self.expand, same)
        if self.rerank is not None:
            head = reranked_heads(queries, searched, self.head, same, self.rerank)
        return queries, gallery, head


PLAIN = Refinement()


def _expanded_neighbourhoods(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n n"]:
    """Return R*(i, k1) of each node i (eq. 3 and 4): reciprocal neighbours R(i, k1), plus those of
    neighbours.

    A neighbour's R(j, k1 / 2) is added if more than two thirds of it lie in R(i, k1).
    """

    def reciprocal(nearest: Int64[np.ndarray, "n _"]) -> NDArray[np.float64]:
        member = np.zeros((len(near), len(near)))
        np.put_along_axis(member, nearest, 1, axis=1)
        return member * member.T

    first = reciprocal(near)
    half = reciprocal(near[:, : round((near.shape[1] - 1) / 2) + 1])
    # the product counts what R(i) and R(j) share
    joins = first * (first @ half.T > 2 / 3 * half.sum(axis=1))
    return first + joins @ half > 0
