"""Re-rank the head of each query's ranking by the similarities among its images.

Both methods look only at the K nearest of a query: after one exact search, their cost does not grow with the gallery.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.nearest import as_float32, nearest


@dataclass(frozen=True)
class KReciprocal:
    """Re-ranking by neighbours in common (Zhong et al. 2017), among the query and its head.

    Distances are d = (1 - s) / 2, from 0 to 1 like the Jaccard distance that they are mixed with. The authors' code
    divides by the greatest distance instead.
    """

    name: ClassVar[str] = "k-reciprocal"
    neighbours: int = 20  # k1: neighbours of an image that may be reciprocal
    smoothing: int = 6  # k2: neighbourhoods that are averaged, including the image's own
    original: float = 0.3  # λ: weight of the original distance

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.smoothing < 1 or not 0 <= self.original <= 1:
            raise DistapError(f"{self}: expected neighbours and smoothing of at least 1, original from 0 to 1")

    def order(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Int64[np.ndarray, " K"]:
        """New order of the head, as places in it; ties keep their order."""
        nodes = np.concatenate([query[None], head])
        distances = (1 - nodes @ nodes.T) / 2
        near = _itself_and_nearest(nodes, self.neighbours)
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


@dataclass(frozen=True)
class Diffusion:
    """Re-ranking by diffusion over the graph of mutual neighbours in the head (Iscen et al. 2017).

    It solves (I - α S) f = (1 - α) y, where S holds the normalised affinities and y those of the query. Images that
    no path connects to the query come last and keep their order.
    """

    name: ClassVar[str] = "diffusion"
    neighbours: int = 50  # k: neighbours of an image in the graph
    seeds: int = 10  # k_q: images of the head that the query is connected to
    power: float = 3.0  # γ: affinity is max(s, 0)^γ
    walk: float = 0.99  # α: reach of the diffusion

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.seeds < 1 or self.power < 0 or not 0 <= self.walk < 1:
            raise DistapError(f"{self}: expected neighbours and seeds of at least 1, power 0 or more, walk below 1")

    def order(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Int64[np.ndarray, " K"]:
        """New order of the head, as places in it; ties keep their order."""
        return np.argsort(-self.scores(query, head), kind="stable")

    def scores(self, query: Float32[np.ndarray, " C"], head: Float32[np.ndarray, "K C"]) -> Float64[np.ndarray, " K"]:
        """f of each image of the head, in its given order."""
        similarities, near = nearest(head, head, self.neighbours, exclude_self=True)
        affinity = np.where(_is_mutual(near), np.maximum(similarities, 0).astype(np.float64) ** self.power, 0)
        degree = affinity.sum(axis=1)
        scale = np.divide(1, np.sqrt(degree), out=np.zeros_like(degree), where=degree > 0)
        graph = np.eye(len(head))
        graph[np.arange(len(head))[:, None], near] = -self.walk * affinity * scale[:, None] * scale[near]
        start = np.zeros(len(head))
        start[: self.seeds] = np.maximum(head[: self.seeds] @ query, 0).astype(np.float64) ** self.power
        return np.linalg.solve(graph, (1 - self.walk) * start)


Reranker = KReciprocal | Diffusion
RERANKERS: dict[str, type[Reranker]] = {kind.name: kind for kind in (KReciprocal, Diffusion)}


def reranked_heads(
    reranker: Reranker,
    queries: Float[np.ndarray, "Q C"],
    gallery: Float[np.ndarray, "N _"],
    size: int,
    exclude_self: bool = False,
) -> Int64[Tensor, "Q K"]:
    """The `size` nearest gallery rows of each query, re-ranked.

    Args:
        queries: of length 1.
        gallery: (N, C) of length 1; a memory map is read in blocks.
        size: K, at most the size of the gallery. Re-ranking holds K² numbers for one query at a time.
        exclude_self: query i is row i of the gallery, and not in its own head.
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
    """Each node, and then its nearest others."""
    _, near = nearest(nodes, nodes, neighbours, exclude_self=True)
    return np.concatenate([np.arange(len(nodes))[:, None], near], axis=1)


def _is_mutual(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n k"]:
    """Which neighbours of a node have that node among their own neighbours."""
    node, total = np.arange(len(near))[:, None], len(near)
    return np.isin(near * total + node, node * total + near)


def _expanded_neighbourhoods(near: Int64[np.ndarray, "n k"]) -> Bool[np.ndarray, "n n"]:
    """R*(i, k1) of each node i (eq. 3 and 4): its reciprocal neighbours R(i, k1), grown by those of its neighbours.

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
