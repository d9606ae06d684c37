"""A data set to evaluate on: queries, gallery, the truth of each query, and figures.

Classes or a ground truth say which gallery images are right for a query. The queries retrieve each
other, another gallery as in In-Shop, or a gallery that is drawn from their own images as in
VehicleID.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.boxes import Box
from distap.data.joined import JoinedImages
from distap.data.loading.reader import ImageSet
from distap.errors import DistapError
from distap.evaluation.described_images import descriptors_of
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.ground_truth import GroundTruth
from distap.evaluation.joined_rows import JoinedRows
from distap.evaluation.query_values import (
    Draws,
    QueryValues,
    right_image_classes,
    rows_of_draws,
    values_by_query,
)
from distap.evaluation.row_folder import RowFolder
from distap.evaluation.saved import DRAWN, LABELLED, QUERIED, Evaluation, Retrieved
from distap.evaluation.upgrade import NEW_TO_OLD, OLD_TO_NEW, OLD_TO_OLD
from distap.retrieval.evaluate import Evaluated, evaluate_descriptors, figure_names
from distap.retrieval.figures import GRADED
from distap.retrieval.refinement import PLAIN, Refinement
from distap.retrieval.row_blocks import DescriptorParts, Descriptors, open_parts
from distap.retrieval.truth import Truth, class_truth

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
    # what another network has described: the gallery, and the queries if they are there too
    gallery_rows: tuple[RowFolder, ...] = ()

    @cached_property
    def images(self) -> JoinedImages:
        """Return the images of the queries, then those of a gallery that are no queries too."""
        return JoinedImages((*self.queries, *self.gallery))

    @property
    def kind(self) -> str:
        """Name of the kind of evaluation, for results."""
        if self.truth is not None:
            return self.truth.dataset
        if self.draws:
            return DRAWN
        return QUERIED if self.gallery else LABELLED

    @property
    def gallery_name(self) -> str | None:
        """Name of the gallery, for results; None if it is the other queries."""
        names = [*(images.name for images in self.gallery), *self.distractors]
        if self.draws:
            names.append(f"an image a class, drawn {self.draws} times")
        return " and ".join(names) or None

    @property
    def has_queries_in_gallery(self) -> bool:
        """Return whether some queries are images of the gallery that is given."""
        return len(self.images.sets) < len(self.queries) + len(self.gallery)

    @cached_property
    def joined_rows(self) -> JoinedRows:
        """Return `gallery_rows` joined with the images."""
        truth = self.truth
        has_boxes = truth is not None and any(query.box for query in truth.queries)
        return JoinedRows(self.images, self.queries, self.gallery, self.gallery_rows, has_boxes)

    @property
    def figure_names(self) -> list[str]:
        """Names of the figures of its evaluation, with those of groups and parts of queries, and
        of other directions.
        """
        truth = self.truth
        images = self.images
        groups = [""]
        domains = list[str]()
        if truth is not None and truth.queries:
            groups = list(truth.groups or groups)
            domains = [query.part for query in truth.queries]
        elif truth is not None:
            names = images.classes[images.samples(self.queries)].tolist()
            domains = [name.partition("/")[0] for name in names]
        elif GRADED.keys() & set(self.figures):
            labels = images.labels(images.samples(images.sets), with_levels=True)
            groups += [f"level {level}" for level in range(1, labels[:1].size)]
        names = figure_names(self.figures, groups, domains)
        return names + [
            f"{prefix} {name}" for prefix in self.joined_rows.directions for name in names
        ]

    def describe(self, describing: Describing) -> "DescribedSet":
        """Describe queries, each within its box, and gallery on all ranks.

        Every rank gets all descriptors.
        """
        self.joined_rows.require_dimensions(describing.describer.dimensions)
        images = self.images
        truth = self.truth
        by_class = truth is not None and truth.query
        names = images.classes if by_class else images.keys
        boxes = dict[int, Box]()
        if truth is not None:
            asked = names[images.samples(self.queries)].tolist()
            searched = names[images.samples(self.gallery or self.queries)].tolist()
            truth = truth.named_as(asked, searched)
            boxes = truth.boxes(self.name, asked)
        described_sets = dict[tuple[ImageSet, bool], tuple[NDArray[np.int64], NDArray[Any]]]()

        def described(
            sets: tuple[ImageSet, ...], boxes: Mapping[int, Box]
        ) -> tuple[NDArray[np.int64], Descriptors]:
            """Return the numbers of images, which count on from set to set, and their
            descriptors.
            """
            samples = list[NDArray[np.int64]]()
            descriptors = list[tuple[str, NDArray[Any]]]()
            for one_set in sets:
                first = images.first[one_set]
                set_boxes = {
                    sample - first: box
                    for sample, box in boxes.items()
                    if 0 <= sample - first < len(one_set)
                }
                # Where the queries are images of the gallery, they are described once, unless each
                # has its box.
                key = (one_set, bool(set_boxes))
                if key not in described_sets:
                    rows_of_set = descriptors_of(describing, one_set, set_boxes)
                    described_sets[key] = self.joined_rows.with_rows(one_set, *rows_of_set)
                set_samples, rows = described_sets[key]
                samples.append(first + set_samples)
                descriptors.append((one_set.name, rows))
            joined = descriptors[0][1] if len(sets) == 1 else DescriptorParts(descriptors)
            return np.concatenate(samples), joined

        query_samples, queries = described(self.queries, boxes)
        gallery_samples, gallery = query_samples, queries
        if self.gallery:
            gallery_samples, gallery = described(self.gallery, {})

        described_set = DescribedSet(
            self, queries, gallery, query_samples, gallery_samples, None, describing
        )
        described_set = described_set.with_stored()
        if truth is None:
            return described_set
        if truth.queries:
            return described_set.listed_by(truth, names)
        device = describing.describer.device
        by_classes = truth.of_classes(images.classes, query_samples, gallery_samples, device)
        return replace(described_set, truth=by_classes)


@dataclass(frozen=True)
class DescribedSet:
    """Descriptors of a set's images, without failed ones: Q queries, and a gallery of N images."""

    evaluation_set: EvaluationSet
    queries: Descriptors  # (Q, C), in the order of the ground truth if it lists queries
    gallery: Descriptors  # (N, C); the queries, if they are retrieved
    query_samples: NDArray[np.int64]  # numbers of the queries in the set's joined images
    gallery_samples: NDArray[np.int64]  # numbers of the gallery's images there
    truth: Truth | None  # that of the ground truth; None: images of the query's class are right
    describing: Describing
    # queries and gallery, in the same order, as the network of `gallery_rows` describes them; None
    # where it has not
    stored_queries: Descriptors | None = None
    stored_gallery: Descriptors | None = None
    listed: tuple[str, ...] | None = None  # names of the queries that a ground truth lists

    def with_stored(self) -> "DescribedSet":
        """Take the rows of another network, if there are any."""
        evaluation_set = self.evaluation_set
        joined = evaluation_set.joined_rows
        queries = gallery = None
        if OLD_TO_OLD in joined.directions:
            queries = gallery = joined.rows(evaluation_set.queries, self.query_samples)
        if joined.directions and evaluation_set.gallery:
            gallery = joined.rows(evaluation_set.gallery, self.gallery_samples)
        return replace(self, stored_queries=queries, stored_gallery=gallery)

    def listed_by(self, truth: GroundTruth, names: NDArray[np.str_]) -> "DescribedSet":
        """Take the queries that a ground truth lists, and instances in place of their images.

        Args:
            names: names of all images, as `truth` has them.
        """
        asked = names[self.query_samples].tolist()
        searched = names[self.gallery_samples].tolist()
        lost = {*names.tolist()}.difference(asked, searched)

        def as_queries(rows: Descriptors) -> tuple[Any, Descriptors]:
            return truth.asked(*truth.grouped(asked, rows, lost.union(searched)))

        def as_gallery(rows: Descriptors) -> tuple[Any, Descriptors]:
            return truth.grouped(searched, rows, lost.union(asked))

        records, queries = as_queries(self.queries)
        gallery_names, gallery = as_gallery(self.gallery)
        stored_queries = self.stored_queries
        stored_gallery = self.stored_gallery
        if stored_queries is not None:
            stored_queries = as_queries(stored_queries)[1]
        if stored_gallery is not None:
            stored_gallery = as_gallery(stored_gallery)[1]
        listed = truth.of_gallery(
            records,
            gallery_names,
            self.describing.describer.device,
            self.evaluation_set.has_queries_in_gallery,
            lost,
        )
        return replace(
            self,
            queries=queries,
            gallery=gallery,
            truth=listed,
            stored_queries=stored_queries,
            stored_gallery=stored_gallery,
            listed=tuple(str(query.name) for query in records),
        )

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """Return the numbers of all images: the queries', then those of another gallery."""
        if not self.evaluation_set.gallery:
            return self.query_samples
        return np.concatenate([self.query_samples, self.gallery_samples])

    @cached_property
    def classes(self) -> NDArray[np.str_]:
        """Return the class names of the images of `samples`, "" for none."""
        return self.evaluation_set.images.classes[self.samples]

    @cached_property
    def labels(self) -> torch.Tensor:
        """Return the class numbers of the images of `samples`, see `JoinedImages.labels`."""
        is_graded = bool(GRADED.keys() & set(self.evaluation_set.figures))
        labels = self.evaluation_set.images.labels(self.samples, with_levels=is_graded)
        return torch.from_numpy(labels).to(self.describing.describer.device)

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; all ranks call this.

        With drawn galleries, figures are means over the draws. With the rows of another network,
        there are figures of each direction, such as `new-to-old mAP`.
        """
        evaluation_set = self.evaluation_set
        truth = evaluation_set.truth
        results, figures = self._averaged(refinement)
        first = results[0][1]
        for direction in evaluation_set.joined_rows.directions:
            of_direction = self._of_direction(direction, refinement)
            figures |= {f"{direction} {name}": value for name, value in of_direction.items()}
        count = len(self.queries)
        has_hits = not (truth or evaluation_set.draws)
        expected = 0 if truth is None else len(truth.queries)
        return Evaluation(
            data=evaluation_set.queries[0].name if truth is None else evaluation_set.name,
            gallery=evaluation_set.gallery_name,
            protocol=evaluation_set.kind,
            refinement=self.refined_by(refinement),
            fingerprint=evaluation_set.images.fingerprint,
            images=count + (len(self.gallery) if evaluation_set.gallery else 0),
            queries=int((first.first_positive > 0).sum()),
            # A listed query whose own image could not be described counts as left out too.
            left_out=first.left_out + max(expected - count, 0),
            figures=figures,
            hits=Retrieved.of(evaluation_set.images, self.samples, first) if has_hits else None,
            by_query=self._by_query(results),
        )

    def _averaged(self, refinement: Refinement) -> tuple[Draws, dict[str, float]]:
        """Return rows of queries and result of each draw, and the figures over all draws."""
        results = [
            (queries, self._evaluated(queries, gallery, refinement))
            for queries, gallery in rows_of_draws(self.classes, self.evaluation_set.draws)
        ]
        summaries = [evaluated.summary() for _, evaluated in results]
        figures = {
            name: float(np.mean([summary[name] for summary in summaries])) for name in summaries[0]
        }
        return results, figures

    def _by_query(self, results: Draws) -> QueryValues:
        if self.truth is not None and self.listed is not None:
            return values_by_query(results, self.listed, right_image_classes(self.truth.positives))
        count = len(self.query_samples)
        keys = self.evaluation_set.images.keys[self.query_samples].tolist()
        return values_by_query(results, keys, self.classes[:count].tolist())

    def _of_direction(self, direction: str, refinement: Refinement) -> dict[str, float]:
        """Return the figures with another network's rows as queries, gallery or both.

        The truth is by rows, so that a query leaves its own image out in the other network's rows
        too.
        """
        if direction == NEW_TO_OLD:
            return replace(self, gallery=self.stored_gallery)._averaged(refinement)[1]
        if direction == OLD_TO_NEW:
            return replace(self, queries=self.stored_queries)._averaged(refinement)[1]
        samples = self.query_samples.tobytes(), self.gallery_samples.tobytes()
        constant = self.evaluation_set.joined_rows.constant
        if (*samples, refinement) not in constant:
            sides = replace(self, queries=self.stored_queries, gallery=self.stored_gallery)
            constant[*samples, refinement] = sides._averaged(refinement)[1]
        return constant[*samples, refinement]

    def refined_by(self, refinement: Refinement) -> str:
        """Name of what is done to descriptors or rankings, for results."""
        whitened = [] if self.describing.describer.whitening is None else ["whitening"]
        return " + ".join([*whitened, *refinement.names]) or "plain"

    def _evaluated(self, query_rows: Any, gallery_rows: Any, refinement: Refinement) -> Evaluated:
        evaluation_set = self.evaluation_set
        describer = self.describing.describer
        if evaluation_set.has_queries_in_gallery and (
            refinement.expand is not None or refinement.rerank is not None
        ):
            raise DistapError(
                "evaluation.queries_in_gallery",
                f"{evaluation_set.name}: its queries are in its gallery, and query expansion and"
                " re-ranking would take each for its own first neighbour; give the gallery apart by"
                " --gallery",
            )
        queries = self.queries[query_rows]
        is_labelled = evaluation_set.kind == LABELLED
        gallery = self.gallery[gallery_rows]
        if is_labelled and self.gallery is self.queries:
            gallery = queries  # the same object, so that pairs are compared once
        distractors = self.open_distractors()
        queries, gallery, head = refinement.apply(queries, gallery, distractors, same=is_labelled)
        return evaluate_descriptors(
            queries,
            gallery,
            self.truth or self._class_truth(query_rows, gallery_rows),
            evaluation_set.figures,
            0 if evaluation_set.draws or evaluation_set.truth else NEIGHBOURS,
            head=None if head is None else head.to(describer.device),
            distractors=distractors,
            world=self.describing.world,
        )

    def open_distractors(self) -> DescriptorParts | None:
        paths = self.evaluation_set.distractors
        if not paths:  # the network need not be hashed
            return None
        described_by = self.describing.describer.described_by
        return open_parts(paths, self.queries.shape[1], described_by=described_by)

    def _class_truth(self, query_rows: Any, gallery_rows: Any) -> Truth:
        if self.evaluation_set.kind == LABELLED:
            return class_truth(self.labels)
        if not self.evaluation_set.gallery:
            return class_truth(self.labels[query_rows], self.labels[gallery_rows])
        count = len(self.query_samples)
        return class_truth(self.labels[:count], self.labels[count:], self.contents())

    def contents(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the files of queries and gallery hold, if the gallery has every query's file
        too.

        Such a query would find itself: in place of cameras, these numbers leave its copies out, as
        DyML's authors do.
        """
        device = self.describing.describer.device
        contents = torch.from_numpy(self.evaluation_set.images.contents)
        queries = contents[self.query_samples].to(device)
        gallery = contents[self.gallery_samples].to(device)
        is_there = (queries % 2**32 > 0) & torch.isin(queries, gallery)  # CRC-32 0 is unknown
        return (queries, gallery) if bool(is_there.all()) else None
