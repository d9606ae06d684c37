"""What is done to descriptors between their extraction and the ranking: each part an option, in one fixed order.

Whitening, then database-side augmentation of the gallery, then expansion of the queries, then re-ranking of the
head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.retrieval.expansion import augment_gallery, expand_queries
from distap.retrieval.reranking import Diffusion, KReciprocal, reranked_heads
from distap.retrieval.whitening import Whitening


@dataclass(frozen=True)
class Expansion:
    """Neighbours that a descriptor is moved towards, weighted by the power of their similarity."""

    neighbours: int = 10
    power: float = 2.0  # α; 0 weighs all alike


@dataclass(frozen=True)
class Refined:
    """What is to be ranked."""

    queries: NDArray[Any]  # (Q, D)
    gallery: NDArray[Any]  # (N, D)
    head: Int64[Tensor, "Q K"] | None  # gallery rows that come first for each query


@dataclass(frozen=True)
class Refinement:
    """Parts that are None are left out.

    Args:
        whitening: of queries and gallery.
        augment: database-side augmentation; an exact search of the whole gallery for each of its images.
        expand: of the queries, by their neighbours in the gallery as it then is.
        rerank: of each query's first `head` images.
        head: K.
    """

    whitening: Whitening | None = None
    augment: Expansion | None = None
    expand: Expansion | None = None
    rerank: KReciprocal | Diffusion | None = None
    head: int = 100

    @property
    def name(self) -> str:
        """Its parts in the order in which they are done, `plain` where there is none."""
        parts = {
            "whitening": self.whitening,
            "augmentation": self.augment,
            "query expansion": self.expand,
            self.rerank.name if self.rerank else "": self.rerank,
        }
        return " + ".join(part for part, wanted in parts.items() if wanted is not None) or "plain"

    def variants(self) -> Iterator["Refinement"]:
        """Nothing at all, each part by itself, and all together: what a table of on and off compares."""
        parts = [
            field.name for field in fields(self) if field.name != "head" and getattr(self, field.name) is not None
        ]
        yield Refinement()
        if len(parts) > 1:
            for kept in parts:
                dropped: dict[str, Any] = {part: None for part in parts if part != kept}
                yield replace(self, **dropped)
        if parts:
            yield self

    def apply(self, queries: NDArray[Any], gallery: NDArray[Any], same: bool = False) -> Refined:
        """Refined queries and gallery; what changes is a new array, the rest the one that was given.

        Args:
            queries: (Q, C) of length 1.
            gallery: (N, C) of length 1, maybe a memory map, which is read in blocks.
            same: query i is row i of the gallery: never a neighbour of its own, nor in its own head.
        Raises:
            DistapError: the dimensions do not fit, or a number is not finite.
        """
        if self.whitening is not None:
            queries = self.whitening.apply(queries)
            gallery = queries if same else self.whitening.apply(gallery)
        if self.augment is not None:
            gallery = augment_gallery(gallery, self.augment.neighbours, self.augment.power)
        if same:
            queries = gallery
        if self.expand is not None:
            queries = expand_queries(queries, gallery, self.expand.neighbours, self.expand.power, same)
        head = None
        if self.rerank is not None:
            head = reranked_heads(self.rerank, queries, gallery, self.head, same)
        return Refined(queries, gallery, head)


PLAIN = Refinement()
