"""Evaluate shards with classes as queries against a gallery: that of other shards, or one drawn from their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.evaluation.describing import Describing
from distap.evaluation.saved import QUERIED, Evaluation, Retrieved
from distap.randomness import permutation
from distap.retrieval.metrics import AT, LabelledSetResult, evaluate_queries
from distap.retrieval.refinement import PLAIN, Refinement
from distap.world import ALONE, World

DRAWN = "queries and a gallery that is drawn"  # the protocol
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
        parts = [(self.queries, "query"), *([] if self.gallery is None else [(self.gallery, "gallery")])]
        samples, descriptors = zip(
            *(describing.descriptors(images, f"{self.name}/{part}") for images, part in parts), strict=True
        )
        classes = [images.classes[own] for (images, _), own in zip(parts, samples, strict=True)]
        names, numbers = np.unique(np.concatenate(classes), return_inverse=True)
        labels = tuple(np.split(numbers.reshape(-1), [len(classes[0])])[: len(parts)])
        return DescribedQuerySet(
            self, samples, descriptors, labels, names, describing.describer.device, describing.world
        )


@dataclass(frozen=True)
class DescribedQuerySet:
    """Descriptors of the images of a query set that could be described, of the gallery's too unless it is drawn."""

    of: QuerySet
    samples: tuple[NDArray[np.int64], ...]  # (Q,), (N,) image numbers
    descriptors: tuple[NDArray[Any], ...]  # (Q, C), (N, C)
    labels: tuple[NDArray[np.int64], ...]  # (Q,), (N,) class numbers
    class_name: NDArray[np.str_]  # (K,)
    device: torch.device  # for ranking
    world: World = ALONE  # ranks that share the ranking

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; the mean over the draws, if it is drawn.

        All ranks call this.
        """
        found = [self._ranked(queries, gallery, refinement) for queries, gallery in self._rows()]
        result, summaries = found[0], [one.summary() for one in found]
        figures = {name: float(np.mean([own[name] for own in summaries])) for name in summaries[0]}
        asked = int(result.is_query.sum())
        about: dict[str, Any] = {
            "data": self.of.queries.name,
            "gallery": f"an image a class, drawn {len(found)} times",
            "protocol": DRAWN,
            "refinement": refinement.name,
            "fingerprint": self.of.queries.fingerprint,
            "images": sum(map(len, self.labels)),
        }
        retrieved = None
        if self.of.gallery is not None:
            about |= {"gallery": self.of.gallery.name, "protocol": QUERIED}
            about["fingerprint"] += f"+{self.of.gallery.fingerprint}"
            about["precision_at_recall"] = result.precision_at_recall.tolist()
            by_class = result.class_figures(torch.from_numpy(self.labels[0]).to(self.device))
            about["classes"] = {str(self.class_name[label]): own for label, own in by_class.items()}
            retrieved = self._retrieved(result, self.of.gallery)
        return Evaluation(figures, asked, len(result.is_query) - asked, about, retrieved)

    def _retrieved(self, result: LabelledSetResult, gallery: ImageSet) -> Retrieved:
        """The hits of the queries; the images of the gallery follow them as rows, and are numbered after them."""
        (asking, others), queries = self.samples, self.of.queries

        def filled(values: Any, filling: float) -> Any:
            rest = np.full((len(others), *values.shape[1:]), filling)
            return np.concatenate([values.cpu().numpy(), rest.astype(values.cpu().numpy().dtype)])

        return Retrieved(
            np.concatenate([asking, others + len(queries)]),
            np.concatenate([queries.keys[asking], gallery.keys[others]]),
            np.concatenate(self.labels),
            filled(result.average_precision, np.nan),
            filled(result.average_precision_at_r, np.nan),
            filled(result.first_positive, 0),
            self.class_name,
            filled(result.neighbours + len(asking), 0),
        )

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """The rows of queries and of the gallery, in each draw."""
        if not self.of.draws:
            yield slice(None), slice(None)
        labels = self.labels[0]
        for draw in range(self.of.draws):
            order = permutation(len(labels), GALLERY, draw)
            chosen = order[np.unique(labels[order], return_index=True)[1]]
            yield np.setdiff1d(order, chosen), chosen

    def _ranked(self, queries: Any, gallery: Any, refinement: Refinement) -> LabelledSetResult:
        refined, others, head = refinement.apply(self.descriptors[0][queries], self.descriptors[-1][gallery])
        labels = [
            torch.from_numpy(own[rows]).to(self.device)
            for own, rows in ((self.labels[0], queries), (self.labels[-1], gallery))
        ]
        asking = torch.from_numpy(np.array(refined, dtype=np.float32)).to(self.device)
        head, neighbours = None if head is None else head.to(self.device), 0 if self.of.draws else 10
        shared: dict[str, Any] = {"head": head, "at": self.of.at, "world": self.world}
        return evaluate_queries(asking, others, labels[0], labels[1], neighbours, **shared)
