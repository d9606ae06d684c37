"""A data set to evaluate on: queries, gallery, the truth of each query, and figures.

Classes or a ground truth say which gallery images are right for a query. The queries retrieve each other, another
gallery as in In-Shop, or a gallery that is drawn from their own images as in VehicleID.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.checkpoint.agreement import on_all
from distap.data.images.cropping import Box
from distap.data.images.image_sets import ImageSet
from distap.data.shards.image_folders import warn_of
from distap.errors import DistapError
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import NOT_FINITE, Describing, Extraction, extract_descriptors
from distap.evaluation.ground_truth import GroundTruth, TrueQuery
from distap.evaluation.saved import DRAWN, LABELLED, QUERIED, Evaluation, Retrieved
from distap.randomness import permutation
from distap.retrieval.descriptor_files import DESCRIPTORS_FILE, new_descriptors
from distap.retrieval.evaluate import Evaluated, evaluate_descriptors
from distap.retrieval.refinement import PLAIN, Refinement
from distap.retrieval.truth import ClassTruth, Truth

GALLERY = 31  # first word of the key that galleries are drawn with: the same ones in every run
NEIGHBOURS = 10  # images that are reported of each query
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class EvaluationSet:
    """Queries, their gallery, the truth of each query, and the figures to compute."""

    name: str
    queries: ImageSet
    figures: tuple[str, ...]  # names with their k, see `distap.retrieval.figures`
    gallery: tuple[ImageSet, ...] = ()  # shards that make it up, such as distractors; without any, the other queries
    truth: GroundTruth | None = None  # None: images of the query's class are right
    draws: int = 0  # times that an image of each class is drawn as the gallery of the others; 0 does not

    @property
    def kind(self) -> str:
        """Name of the kind of evaluation, for results."""
        return self.truth.dataset if self.truth else DRAWN if self.draws else QUERIED if self.gallery else LABELLED

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        return self.queries, *self.gallery

    def names(self, images: ImageSet) -> NDArray[np.str_]:
        """Return the names of images in the ground truth: their class names in a set of `distap data convert`."""
        return images.classes if self.truth is not None and self.truth.query is not None else images.keys

    def describe(self, describing: Describing) -> "DescribedSet":
        """Describe queries, each within its box, and gallery on all ranks; every rank gets all descriptors."""
        names = self.names(self.queries)
        boxes = self.truth.boxes(self.queries, names.tolist()) if self.truth else {}
        samples, queries = _descriptors(describing, self.queries, f"{self.name}/queries", boxes)
        parts = [
            # Where the queries are images of the gallery, they are described once, unless each has its box.
            (images, samples, queries)
            if images is self.queries and not boxes
            else (images, *_descriptors(describing, images, f"{self.name}/gallery-{number}", {}))
            for number, images in enumerate(self.gallery)
        ]
        records: tuple[TrueQuery, ...] = ()
        if self.truth:
            row = {name: place for place, name in enumerate(names[samples].tolist())}
            records = tuple(query for query in self.truth.queries if query.name in row)
            asking = [row[query.name] for query in records]
            samples, queries = samples[asking], queries[asking]
        gallery = _joined([own for *_, own in parts], describing, self.name) if parts else queries
        images = [(self.queries, samples), *((one, own) for one, own, _ in parts)]
        before = np.cumsum([0, *map(len, self.image_sets)])
        numbers = np.concatenate([start + own for start, (_, own) in zip(before, images, strict=False)])
        keys, classes = (np.concatenate([getattr(one, of)[own] for one, own in images]) for of in ("keys", "classes"))
        return DescribedSet(self, queries, gallery, numbers, keys, classes, records, describing)


def _descriptors(
    describing: Describing, images: ImageSet, name: str, boxes: Mapping[int, Box]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return image numbers (n,), ascending, without failed images, and descriptors (n, D), on every rank.

    Args:
        name: of the folder to keep descriptors in.
        boxes: by image number, the part of an image to describe, in pixels.
    """
    extraction = Extraction(describing, images, boxes)
    if describing.kept_in is None:
        samples, descriptors, reasons = extract_descriptors(extraction)
        left_out: Mapping[str, str] = {str(images.keys[number]): reason for number, reason in reasons.items()}
    else:
        stored = extract_to_folder(extraction, describing.kept_in / name)
        samples, descriptors = np.flatnonzero(np.isin(images.keys, stored.keys)), stored.descriptors
        left_out = stored.left_out
    if broken := [key for key, reason in left_out.items() if reason == NOT_FINITE]:
        raise DistapError(
            f"{images.name}: {len(broken)} of {len(images)} descriptors are not finite, such as that of {broken[0]}: "
            "the network is broken"
        )
    if describing.world.rank == 0:
        warn_of(images.name, images.left_out)
        for key in left_out.keys() - dict(images.left_out).keys():
            logger.warning("left out of the evaluation: %s of %s: %s", key, images.name, left_out[key])
    return samples, descriptors


def _joined(parts: list[NDArray[Any]], describing: Describing, name: str) -> NDArray[Any]:
    """Join the rows of all parts, in memory or in a file of the folder that keeps descriptors."""
    if len(parts) == 1 or describing.kept_in is None:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    path = describing.kept_in / name / "gallery" / DESCRIPTORS_FILE
    world, ends = describing.world, np.cumsum([len(part) for part in parts])

    def write() -> None:
        joined = new_descriptors(path, (int(ends[-1]), parts[0].shape[1]), parts[0].dtype)
        for part, end in zip(parts, ends, strict=True):
            joined[end - len(part) : end] = part

    on_all(world, write, mine=world.rank == 0)
    return np.asarray(np.load(path, mmap_mode="r"))


@dataclass(frozen=True)
class DescribedSet:
    """Descriptors of a set's images, without failed ones: Q queries, and a gallery of N images."""

    of: EvaluationSet
    queries: NDArray[Any]  # (Q, C), in the order of `records` if there are any
    gallery: NDArray[Any]  # (N, C); the queries, if they are retrieved
    samples: NDArray[np.int64]  # numbers of all images: the queries', then another gallery's, which are counted on
    keys: NDArray[np.str_]  # of all images
    classes: NDArray[np.str_]  # of all images, "" for none
    records: tuple[TrueQuery, ...]  # of the ground truth
    describing: Describing

    @property
    def device(self) -> torch.device:
        return self.describing.describer.device

    @cached_property
    def labels(self) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """Return class numbers of all images, -1 without a class, and the names of the classes."""
        names, numbers = np.unique(self.classes, return_inverse=True)
        return np.where(self.classes == "", -1, numbers.reshape(-1)), names

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; all ranks call this.

        With drawn galleries, figures are means over the draws.
        """
        of = self.of
        found = [self._ranked(asking, among, refinement) for asking, among in self._rows()]
        result, summaries = found[0], [one.summary() for one in found]
        figures = {name: float(np.mean([own[name] for own in summaries])) for name in summaries[0]}
        found_by: dict[str, Any] = {}
        if of.truth:
            columns = {group: result.values[name].tolist() for group, name in result.leading.items()}
            found_by["average_precision"] = {
                str(query.name): {group: own[place] for group, own in columns.items()}
                for place, query in enumerate(self.records)
            }
        elif not of.draws:
            found_by["hits"] = self._retrieved(result)
        drawn = f"an image a class, drawn {len(found)} times" if of.draws else None
        return Evaluation(
            data=of.name if of.truth else of.queries.name,
            gallery=" and ".join(images.name for images in of.gallery) or drawn,
            protocol=of.kind,
            refinement=refinement.name,
            fingerprint="+".join(images.fingerprint for images in of.image_sets),
            images=len(self.keys),
            queries=int(result.is_query.sum()),
            left_out=max(result.left_out.values()) + (len(of.truth.queries) - len(self.records) if of.truth else 0),
            left_out_of=result.left_out if len(result.left_out) > 1 else {},
            figures=figures,
            **found_by,
        )

    def _retrieved(self, result: Evaluated) -> Retrieved:
        """Rank the gallery for each query. Gallery rows are numbered from the number of queries."""
        first = len(self.queries) if self.of.gallery else 0  # row of the gallery's first image

        def filled(values: torch.Tensor, filling: float) -> Any:
            rest = values.new_full((len(self.keys) - len(values), *values.shape[1:]), filling)
            return torch.cat([values, rest]).cpu().numpy()

        return Retrieved(
            self.samples,
            self.keys,
            self.labels[0],
            filled(result.values["mAP"], np.nan),
            filled(result.first_positive, 0),
            self.labels[1],
            filled(result.neighbours + first, 0),
        )

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rows of queries and of the gallery in each draw."""
        if not self.of.draws:
            yield slice(None), slice(None)
        labels = self.labels[0]
        for draw in range(self.of.draws):
            order = permutation(len(labels), GALLERY, draw)
            chosen = order[np.unique(labels[order], return_index=True)[1]]
            yield np.setdiff1d(order, chosen), chosen

    def _ranked(self, asking: Any, among: Any, refinement: Refinement) -> Evaluated:
        is_same = self.of.kind == LABELLED
        if self.of.gallery and self.of.gallery[0] is self.of.queries and (refinement.expand or refinement.rerank):
            raise DistapError(
                f"{self.of.name}: its queries are in its gallery, and query expansion and re-ranking would take each "
                "for its own first neighbour; give the gallery apart by --gallery"
            )
        queries = self.queries[asking]
        refined, gallery, head = refinement.apply(queries, queries if is_same else self.gallery[among], is_same)
        truth, neighbours = self._truth(asking, among), 0 if self.of.draws or self.of.truth else NEIGHBOURS
        head = None if head is None else head.to(self.device)
        rest: dict[str, Any] = {"head": head, "world": self.describing.world}
        return evaluate_descriptors(refined, gallery, truth, self.of.figures, neighbours, **rest)

    def _truth(self, asking: Any, among: Any) -> Truth:
        device, count = self.device, len(self.queries)
        if self.of.truth:
            names = self.classes if self.of.truth.query is not None else self.keys
            is_of_itself = self.of.gallery[0] is self.of.queries
            lost = {name for images in self.of.gallery for name in self.of.names(images)}.difference(names[count:])
            return self.of.truth.of_gallery(self.records, names[count:].tolist(), device, is_of_itself, lost)
        labels = torch.from_numpy(self.labels[0]).to(device)
        if self.of.kind == LABELLED:
            return ClassTruth(labels)
        others = labels[count:] if self.of.gallery else labels
        return ClassTruth(labels[:count][asking], others[among])
