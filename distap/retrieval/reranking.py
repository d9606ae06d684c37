"""Re-ranking: the head of each query's ranking put in another order by how its images lie among each other.

Both ways look at a query's K nearest alone: beyond one exact search their cost does not grow with the gallery.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.nearest import as_float32, nearest


@dataclass(frozen=True)
class KReciprocal:
    """Re-ranking by neighbours in common (Zhong et al. 2017), among the query and its head.

    Distances are d = (1 - s) / 2, from 0 to 1 as the Jaccard distance that they are mixed with; the authors' code
    divides by the greatest distance that it finds.
    """

    name: ClassVar[str] = "k-reciprocal"
    neighbours: int = 20  # k1: of an image, to be reciprocal
    smoothing: int = 6  # k2: images whose neighbourhoods are averaged, the image itself among them
    original: float = 0.3  # λ: weight of the distance itself beside the Jaccard distance

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.smoothing < 1 or not 0 <= self.original <= 1:
            raise DistapError(f"{self}: expected neighbours and smoothing of at least 1, original from 0 to 1")

    def order(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Int64[np.ndarray, " K"]:
        """Places of the head in their new order; those that are as near keep the old one."""
        nodes = np.concatenate([query[None], head])
        distances = (1 - nodes @ nodes.T) / 2
        near = _itself_and_nearest(nodes, self.neighbours)
        rows, columns = np.nonzero(_expanded_neighbourhoods(near))
        weights = np.exp(-distances[rows, columns].astype(np.float64))  # eq. 7
        weights /= np.bincount(rows, weights)[rows]
        jaccard = _jaccard_to_first(rows, columns, weights, near[:, : self.smoothing])
        mixed = (1 - self.original) * jaccard + self.original * distances[0]  # eq. 12
        return np.argsort(mixed[1:], kind="stable")


@dataclass(frozen=True)
class Diffusion:
    """Re-ranking by diffusion over the graph of mutual neighbours in the head (Iscen et al. 2017).

    Solves (I - α S) f = (1 - α) y by conjugate gradients, with S the normalised affinities and y those of the query;
    images that no path joins to the query come last, in the order they had.
    """

    name: ClassVar[str] = "diffusion"
    neighbours: int = 50  # k of an image in the graph
    seeds: int = 10  # k_q: images of the head that the query is joined to
    power: float = 3.0  # γ: affinity is max(s, 0)^γ
    walk: float = 0.99  # α: how far it reaches
    tolerance: float = 1e-6  # of the residual, relative to y
    iterations: int = 200  # at most

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.seeds < 1 or self.power < 0 or not 0 <= self.walk < 1:
            raise DistapError(f"{self}: expected neighbours and seeds of at least 1, power 0 or more, walk below 1")
        if not 0 < self.tolerance < 1 or self.iterations < 1:
            raise DistapError(f"{self}: expected a tolerance between 0 and 1 and at least one iteration")

    def order(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Int64[np.ndarray, " K"]:
        """Places of the head in their new order; those that are as near keep the old one."""
        scores = self.scores(query, head)
        return np.argsort(-scores, kind="stable")

    def scores(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Float64[np.ndarray, " K"]:
        """f of each image of the head, best first as it was."""
        similarities, near = nearest(head, head, self.neighbours, exclude_self=True)
        affinity = np.where(_is_mutual(near), np.maximum(similarities, 0).astype(np.float64) ** self.power, 0)
        degree = affinity.sum(axis=1)
        scale = np.divide(1, np.sqrt(degree), out=np.zeros_like(degree), where=degree > 0)
        affinity *= scale[:, None] * scale[near]
        start = np.zeros(len(head))
        start[: self.seeds] = np.maximum(head[: self.seeds] @ query, 0).astype(np.float64) ** self.power
        return self._solved(affinity, near, (1 - self.walk) * start)

    def _solved(
        self, affinity: Float64[np.ndarray, "K k"], near: Int64[np.ndarray, "K k"], right: Float64[np.ndarray, " K"]
    ) -> Float64[np.ndarray, " K"]:
        result, residual = np.zeros_like(right), right.copy()
        direction, length = residual.copy(), residual @ residual
        enough = self.tolerance**2 * length
        for _ in range(self.iterations):
            if length <= enough:
                break
            image = direction - self.walk * (affinity * direction[near]).sum(axis=1)
            step = length / (direction @ image)
            result += step * direction
            residual -= step * image
            length, before = residual @ residual, length
            direction = residual + length / before * direction
        return result


Reranker = KReciprocal | Diffusion
RERANKERS: dict[str, type[Reranker]] = {kind.name: kind for kind in (KReciprocal, Diffusion)}


def reranked_heads(
    reranker: Reranker,
    queries: Float[np.ndarray, "Q C"],
    gallery: Float[np.ndarray, "N _"],
    size: int,
    exclude_self: bool = False,
) -> Int64[Tensor, "Q K"]:
    """The `size` nearest gallery rows of each query, in the order that the re-ranker gives them.

    Args:
        reranker: one of `RERANKERS`, with its settings.
        queries: of length 1.
        gallery: (N, C) of length 1; a memory map is read in blocks.
        size: K, cut to the gallery. Memory is of K² numbers for one query at a time.
        exclude_self: query i is row i of the gallery, and not in its own head.
    Raises:
        DistapError: the shapes do not fit, or a number is not finite.
    """
    if size < 1:
        raise DistapError(f"re-ranking: a head of {size} images, expected at least 1")
    size = min(size, len(gallery) - exclude_self)
    heads = np.empty((len(queries), max(size, 0)), np.int64)
    if heads.size:
        _, found = nearest(queries, gallery, size, exclude_self)
        for row, near in enumerate(found):
            query, head = as_float32(queries[row : row + 1], row, "query")[0], np.asarray(gallery[near], np.float32)
            heads[row] = near[reranker.order(query, head)]
    return torch.from_numpy(heads)


def _itself_and_nearest(nodes: Float32[np.ndarray, "n C"], neighbours: int) -> Int64[np.ndarray, "n k"]:
    """Each node, by its index, and then its nearest others."""
    _, near = nearest(nodes, nodes, neighbours, exclude_self=True)
    return np.concatenate([np.arange(len(nodes))[:, None], near], axis=1)


def _is_mutual(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n k"]:
    """Which of a node's neighbours have it among theirs."""
    node, total = np.arange(len(near))[:, None], len(near)
    return np.isin(near * total + node, node * total + near)


def _expanded_neighbourhoods(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n n"]:
    """R*(i, k1): reciprocal neighbours, and those of half as many of each that shares two thirds (eq. 3 and 4)."""
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


def _jaccard_to_first(
    rows: Int64[np.ndarray, " m"],
    columns: Int64[np.ndarray, " m"],
    weights: Float64[np.ndarray, " m"],
    averaged: Int64[np.ndarray, "n k"],
) -> Float64[np.ndarray, " n"]:
    """Jaccard distance of each node's averaged neighbourhood to that of node 0 (eq. 10 and 11).

    Args:
        rows, columns, weights: the neighbourhoods, as the entries of a sparse matrix whose rows sum to one.
        averaged: nodes whose neighbourhoods make that of each node.
    """
    total = len(averaged)
    of_first = np.isin(rows, averaged[0])
    first = np.bincount(columns[of_first], weights[of_first], minlength=total) / averaged.shape[1]
    support = np.flatnonzero(first)  # all others have nothing in common with it
    place = np.full(total, -1)
    place[support] = np.arange(len(support))
    shown = place[columns] >= 0
    table = np.zeros((total, len(support)))
    table[rows[shown], place[columns[shown]]] = weights[shown]
    smooth = np.zeros_like(table)
    for near in averaged.T:
        smooth += table[near]
    smooth /= averaged.shape[1]
    common: NDArray[np.float64] = np.minimum(smooth, first[support]).sum(axis=1)
    return 1 - common / (2 - common)  # both sum to one
