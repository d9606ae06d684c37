"""A data set to evaluate on: queries, gallery, the truth of each query, and figures.

Classes or a ground truth say which gallery images are right for a query. The queries retrieve each
other, another gallery as in In-Shop, or a gallery that is drawn from their own images as in
VehicleID.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.boxes import Box
from distap.data.labels import table_of_levels
from distap.data.loading.reader import ImageSet
from distap.data.plan import Classes
from distap.data.shards.image_folders import warn_of
from distap.errors import DistapError, logger
from distap.evaluation.described_images import DescribedImages
from distap.evaluation.extraction.extracting import Describing, Extraction, extract_descriptors
from distap.evaluation.ground_truth import GroundTruth
from distap.evaluation.saved import DRAWN, LABELLED, QUERIED, Evaluation, Retrieved
from distap.randomness import permutation
from distap.retrieval.evaluate import Evaluated, evaluate_descriptors
from distap.retrieval.figures import GRADED
from distap.retrieval.refinement import PLAIN, Refinement
from distap.retrieval.row_blocks import DescriptorParts, Descriptors, open_parts
from distap.retrieval.truth import Truth, class_truth

GALLERY = 31  # first word of the key that galleries are drawn with: the same ones in every run
NEIGHBOURS = 10  # images that are reported of each query


@dataclass(frozen=True)
class EvaluationSet:
    """Queries, their gallery, the truth of each query, and the figures to compute."""

    name: str
    queries: tuple[ImageSet, ...]
    figures: tuple[str, ...]  # names with their k, see `distap.retrieval.figures`
    gallery: tuple[ImageSet, ...] = ()  # shards that make it up; without any, the other queries
    truth: GroundTruth | None = None  # None: images of the query's class are right
    # times that an image of each class is drawn as the gallery of the others; 0 does not
    draws: int = 0
    distractors: tuple[str, ...] = ()  # files and folders of descriptors, see `open_parts`

    @property
    def kind(self) -> str:
        """Name of the kind of evaluation, for results."""
        return (
            self.truth.dataset
            if self.truth
            else DRAWN
            if self.draws
            else QUERIED
            if self.gallery
            else LABELLED
        )

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """Return the sets of queries, then those of the gallery that are no queries too."""
        return tuple({id(images): images for images in (*self.queries, *self.gallery)}.values())

    @property
    def is_of_itself(self) -> bool:
        """Return whether some queries are images of the gallery that is given."""
        return len(self.image_sets) < len(self.queries) + len(self.gallery)

    def describe(self, describing: Describing) -> "DescribedSet":
        """Describe queries, each within its box, and gallery on all ranks; every rank gets all
        descriptors.
        """
        truth = self.truth
        sets = self.image_sets
        first = dict(zip(map(id, sets), np.cumsum([0, *map(len, sets)]).tolist(), strict=False))
        keys, classes = (
            np.concatenate([getattr(one, of) for one in sets]) for of in ("keys", "classes")
        )
        names = (classes if truth is not None and truth.query else keys).tolist()
        if truth is not None:
            asked, others = (
                [
                    name
                    for one in parts
                    for name in names[first[id(one)] : first[id(one)] + len(one)]
                ]
                for parts in (self.queries, self.gallery or self.queries)
            )
            truth = truth.named_as(asked, others)
        whole = dict[tuple[int, bool], tuple[NDArray[np.int64], NDArray[Any]]]()

        def described(
            parts: tuple[ImageSet, ...], boxes: Mapping[int, Box]
        ) -> tuple[NDArray[np.int64], Descriptors]:
            """Return numbers of images, which count on from set to set, and their descriptors."""
            numbers = list[NDArray[np.int64]]()
            rows = list[tuple[str, NDArray[Any]]]()
            for images in parts:
                start = first[id(images)]
                own = {
                    number - start: box
                    for number, box in boxes.items()
                    if 0 <= number - start < len(images)
                }
                # Where the queries are images of the gallery, they are described once, unless each
                # has its box.
                place = id(images), bool(own)
                samples, found = whole[place] = whole.get(place) or _descriptors(
                    describing, images, own
                )
                numbers.append(start + samples)
                rows.append((images.name, found))
            return np.concatenate(numbers), rows[0][1] if len(rows) == 1 else DescriptorParts(rows)

        boxes = (
            {} if truth is None else truth.boxes(self.name, names[: sum(map(len, self.queries))])
        )
        asking, queries = described(self.queries, boxes)
        among, gallery = described(self.gallery, {}) if self.gallery else (asking, queries)
        listed = None
        device = describing.describer.device
        if truth is not None and truth.queries:
            asked, others = ([names[number] for number in own] for own in (asking, among))
            lost = {*names}.difference(asked, others)
            records, queries = truth.asking(*truth.grouped(asked, queries, lost.union(others)))
            of_gallery, gallery = truth.grouped(others, gallery, lost.union(asked))
            listed = truth.of_gallery(records, of_gallery, device, self.is_of_itself, lost)
        elif truth is not None:
            listed = truth.of_classes(classes, asking, among, device)
        return DescribedSet(
            self, queries, gallery, asking, among, keys, classes, listed, describing
        )


def _descriptors(
    describing: Describing, images: ImageSet, boxes: Mapping[int, Box]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return image numbers (n,), ascending, without failed images, and descriptors (n, D), on every
    rank.

    Args:
        boxes: by image number, the part of an image to describe, in pixels.
    """
    if isinstance(images, DescribedImages):
        return np.arange(len(images)), images.described_by(describing.describer)
    samples, descriptors, reasons = extract_descriptors(Extraction(describing, images, boxes))
    left_out = {str(images.keys[number]): reason for number, reason in reasons.items()}
    if describing.world.rank == 0:
        warn_of(images.name, images.index.left_out)
        for key in left_out.keys() - dict(images.index.left_out).keys():
            logger.warning(
                "left out of the evaluation: %s of %s: %s", key, images.name, left_out[key]
            )
    return samples, descriptors


@dataclass(frozen=True)
class DescribedSet:
    """Descriptors of a set's images, without failed ones: Q queries, and a gallery of N images."""

    of: EvaluationSet
    queries: Descriptors  # (Q, C), in the order of the ground truth if it lists queries
    gallery: Descriptors  # (N, C); the queries, if they are retrieved
    asking: NDArray[np.int64]  # numbers of the queries' images, which count on from set to set
    among: NDArray[np.int64]  # numbers of the gallery's images
    keys: NDArray[np.str_]  # of all images
    classes: NDArray[np.str_]  # of all images, "" for none
    listed: Truth | None  # that the ground truth tells
    describing: Describing

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Return the numbers of all images: the queries', then those of another gallery."""
        return np.concatenate([self.asking, self.among]) if self.of.gallery else self.asking

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Return class numbers of the images of `rows`, -1 without a class; for graded figures of L
        levels (n, L).
        """
        names, numbers = np.unique(self.classes[self.rows], return_inverse=True)
        numbers = np.where(names[numbers] == "", -1, numbers)
        if not GRADED.keys() & set(self.of.figures):
            return numbers
        above = dict[str, tuple[str, ...]]()
        for index in (images.index for images in self.of.image_sets):
            above |= dict(
                zip(index.class_name.tolist(), map(tuple, index.class_levels.tolist()), strict=True)
            )
        table = table_of_levels([above.get(name, ()) for name in names.tolist()])
        levels = Classes(np.arange(len(names)), table).numbers[numbers]
        return np.where(numbers[:, None] < 0, -1, levels) if table.size else numbers

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; all ranks call this.

        With drawn galleries, figures are means over the draws.
        """
        of = self.of
        found = [self._ranked(asking, among, refinement) for asking, among in self._rows()]
        result = found[0]
        summaries = [one.summary() for one in found]
        figures = {name: float(np.mean([own[name] for own in summaries])) for name in summaries[0]}
        among = [*(images.name for images in of.gallery), *of.distractors]
        among += [f"an image a class, drawn {len(found)} times"] if of.draws else []
        asked = len(self.queries)
        whitened = [] if self.describing.describer.whitening is None else ["whitening"]
        return Evaluation(
            data=of.name if of.truth else of.queries[0].name,
            gallery=" and ".join(among) or None,
            protocol=of.kind,
            refinement=" + ".join([*whitened, *refinement.names]) or "plain",
            fingerprint="+".join(images.index.fingerprint for images in of.image_sets),
            images=asked + (len(self.gallery) if of.gallery else 0),
            queries=int((result.first_positive > 0).sum()),
            # A listed query whose own image could not be described counts as left out too.
            left_out=result.left_out + max(len(of.truth.queries if of.truth else ()) - asked, 0),
            figures=figures,
            hits=None if of.truth or of.draws else self._retrieved(result),
        )

    def _retrieved(self, result: Evaluated) -> Retrieved:
        first = len(self.asking) if self.of.gallery else 0  # row of the gallery's first image
        found = result.values["mAP"], result.first_positive, result.neighbours + first
        of_images = self.rows, self.keys[self.rows], self.classes[self.rows]
        return Retrieved(*of_images, *(own.cpu().numpy() for own in found))

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rows of queries and of the gallery in each draw."""
        if not self.of.draws:
            yield slice(None), slice(None)
        classes = self.classes[self.rows]
        for draw in range(self.of.draws):
            order = permutation(len(classes), GALLERY, draw)
            # The first image of each class in a random order of all is a random one of the class.
            chosen = order[np.unique(classes[order], return_index=True)[1]]
            yield np.setdiff1d(order, chosen), chosen

    def _ranked(self, asking: Any, among: Any, refinement: Refinement) -> Evaluated:
        of = self.of
        is_same = self.of.kind == LABELLED
        if of.is_of_itself and (refinement.expand is not None or refinement.rerank is not None):
            raise DistapError(
                f"{of.name}: its queries are in its gallery, and query expansion and re-ranking"
                " would take each for its own first neighbour; give the gallery apart by --gallery"
            )
        queries = self.queries[asking]
        more = None
        if of.distractors:  # or else the network need not be hashed
            made = self.describing.describer.described_by
            more = open_parts(of.distractors, queries.shape[1], described_by=made)
        gallery = queries if is_same else self.gallery[among]
        refined, gallery, head = refinement.apply(queries, gallery, more)
        truth = self._truth(asking, among)
        neighbours = 0 if of.draws or of.truth else NEIGHBOURS
        head = None if head is None else head.to(self.describing.describer.device)
        rest: dict[str, Any] = {"head": head, "distractors": more, "world": self.describing.world}
        return evaluate_descriptors(refined, gallery, truth, of.figures, neighbours, **rest)

    def _truth(self, asking: Any, among: Any) -> Truth:
        of = self.of
        if self.listed is not None:
            return self.listed
        labels = torch.from_numpy(self.labels).to(self.describing.describer.device)
        if of.kind == LABELLED:
            return class_truth(labels)
        count = len(self.asking)
        others = labels[count:] if of.gallery else labels
        return class_truth(
            labels[:count][asking], others[among], self._contents() if of.gallery else None
        )

    def _contents(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return numbers of what the files of queries and gallery hold, if the gallery has every
        query's file too.

        Such a query would find itself: in place of cameras, these numbers leave its copies out, as
        DyML's authors do.
        """
        indexes = [one.index for one in self.of.image_sets]
        device = self.describing.describer.device
        files = torch.from_numpy(
            np.concatenate([(index.size << 32) + index.crc32 for index in indexes])
        )
        asking, among = (files[own].to(device) for own in (self.asking, self.among))
        is_there = (asking % 2**32 > 0) & torch.isin(asking, among)  # a CRC-32 of 0 is unknown
        return (asking, among) if bool(is_there.all()) else None
