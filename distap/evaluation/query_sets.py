"""Evaluate shards with classes as queries against a gallery: that of other shards, or one drawn from their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.evaluation.describing import Describing
from distap.evaluation.saved import Evaluation
from distap.randomness import permutation
from distap.retrieval.metrics import AT, evaluate_queries
from distap.retrieval.refinement import PLAIN, Refinement

GALLERY = 31  # first word of the key that galleries are drawn with: the same ones in every run


@dataclass(frozen=True)
class QuerySet:
    """Images of shards with classes as queries against a gallery."""

    name: str
    queries: ImageSet
    gallery: ImageSet | None  # None draws an image of each class of the queries
    draws: int = 0
    at: tuple[int, ...] = AT  # the k of R@k and mP@k

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        return (self.queries,) if self.gallery is None else (self.queries, self.gallery)

    def describe(self, describing: Describing) -> "DescribedQuerySet":
        """Describe queries and gallery on all ranks; every rank gets all descriptors."""
        parts = [*zip(self.image_sets, ("query", "gallery"), strict=False)]
        classes, descriptors = [], []
        for images, part in parts:
            samples, own = describing.descriptors(images, f"{self.name}/{part}")
            classes.append(images.classes[samples])
            descriptors.append(own)
        numbers = np.unique(np.concatenate(classes), return_inverse=True)[1].reshape(-1)
        labels = tuple(np.split(numbers, [len(classes[0])])[: len(parts)])
        return DescribedQuerySet(self, tuple(descriptors), labels, describing.describer.device)


@dataclass(frozen=True)
class DescribedQuerySet:
    """Descriptors of the images of a query set that could be described."""

    of: QuerySet
    descriptors: tuple[NDArray[Any], ...]  # (Q, C) of the queries, (N, C) of the gallery if it is not drawn
    labels: tuple[NDArray[np.int64], ...]  # class numbers of each
    device: torch.device  # for ranking

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; the mean over the draws, if it is drawn."""
        found = [self._ranked(queries, gallery, refinement) for queries, gallery in self._rows()]
        figures = {name: float(np.mean([figures[name] for figures, _, _ in found])) for name in found[0][0]}
        _, asked, left_out = found[0]
        about = {
            "data": self.of.queries.name,
            "gallery": self.of.gallery.name if self.of.gallery else f"an image a class, drawn {len(found)} times",
            "protocol": "queries and gallery",
            "refinement": refinement.name,
            "fingerprint": self.of.queries.fingerprint,
            "images": sum(map(len, self.labels)),
        }
        return Evaluation(figures, asked, left_out, about)

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """The rows of queries and of the gallery, in each draw."""
        if not self.of.draws:
            yield slice(None), slice(None)
        labels = self.labels[0]
        for draw in range(self.of.draws):
            order = permutation(len(labels), GALLERY, draw)
            chosen = order[np.unique(labels[order], return_index=True)[1]]
            yield np.setdiff1d(order, chosen), chosen

    def _ranked(self, queries: Any, gallery: Any, refinement: Refinement) -> tuple[dict[str, float], int, int]:
        """Figures, the number of queries, and that of queries without a positive."""
        refined, others, head = refinement.apply(self.descriptors[0][queries], self.descriptors[-1][gallery])
        labels = [
            torch.from_numpy(own[rows]).to(self.device)
            for own, rows in ((self.labels[0], queries), (self.labels[-1], gallery))
        ]
        asking = torch.from_numpy(np.array(refined, dtype=np.float32)).to(self.device)
        head = None if head is None else head.to(self.device)
        figures, asked = evaluate_queries(asking, others, labels[0], labels[1], self.of.at, head=head)
        return figures, asked, len(asking) - asked
