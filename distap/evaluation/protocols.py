"""Evaluate data sets, each by its protocol: shards with classes, or a split of queries with a ground truth.

In shards with classes, every image is a query against all others; against those of other shards, as in In-Shop; or
against an image of each class that is drawn as gallery, as in VehicleID. For Revisited Oxford and Paris, and Google
Landmarks v2, `distap data convert` writes a file that lists the gallery images that each query is to retrieve.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.data.images.image_sets import ImageSet
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.evaluation.describing import Describing, on_all_ranks
from distap.evaluation.saved import LABELLED, Evaluation, Retrieved, nan_as_null
from distap.retrieval.descriptor_files import DESCRIPTORS_FILE, new_descriptors, reading
from distap.retrieval.ground_truth_metrics import (
    evaluate_graded,
    evaluate_landmarks,
    graded_queries,
    landmark_queries,
)
from distap.retrieval.metrics import (
    AT,
    decomposability_gap,
    evaluate_labelled_set,
)
from distap.retrieval.refinement import PLAIN, Refinement
from distap.world import ALONE, World

GRADED = ("name", "box", "easy", "hard", "junk")
FIELDS = {"roxford5k": GRADED, "rparis6k": GRADED, "gldv2": ("name", "positives", "usage")}  # of a query's record


@dataclass(frozen=True)
class LabelledSet:
    """Shards whose classes say which images match."""

    name: str
    images: ImageSet
    index: Index  # of the shards
    at: tuple[int, ...] = AT  # the k of R@k and mP@k
    gap_batch: int | None = None  # images of the random batches of the figure `gap`

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        return (self.images,)

    def describe(self, describing: Describing) -> "DescribedLabelledSet":
        """Describe the images on all ranks; every rank gets all descriptors."""
        samples, descriptors = describing.descriptors(self.images, self.name)
        return DescribedLabelledSet(self, samples, descriptors, describing.describer.device, describing.world)


@dataclass(frozen=True)
class DescribedLabelledSet:
    """Descriptors of the n images of a labelled set that could be described."""

    of: LabelledSet
    samples: NDArray[np.int64]  # (n,) image numbers, ascending
    descriptors: NDArray[Any]  # (n, C)
    device: torch.device  # for ranking
    world: World = ALONE  # ranks that share the ranking

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank all images for each image; all ranks call this."""
        index, samples = self.of.index, self.samples
        queries, gallery, head = refinement.apply(self.descriptors, self.descriptors, same=True)
        labels, device = torch.from_numpy(index.label[samples]), self.device
        head, asking = None if head is None else head.to(device), None if queries is gallery else queries
        result = evaluate_labelled_set(
            gallery, labels.to(device), head=head, queries=asking, at=self.of.at, world=self.world
        )
        values: dict[str, Any] = {
            name: value.cpu() for name, value in vars(result).items() if isinstance(value, Tensor)
        }
        result = replace(result, **values)
        figures = result.summary()
        if self.of.gap_batch is not None:
            whole = None if refinement.parts else figures["mAP"]
            figures["gap"] = decomposability_gap(
                self.descriptors, labels.to(device), self.of.gap_batch, whole, self.world
            )
        count = int(result.is_query.sum())
        about = {
            "data": self.of.images.name,
            "protocol": LABELLED,
            "refinement": refinement.name,
            "fingerprint": index.fingerprint,
            "images": len(samples),
            "precision_at_recall": result.precision_at_recall.tolist(),
            "classes": {str(index.class_name[row]): own for row, own in result.class_figures(labels).items()},
        }
        retrieved = Retrieved(
            samples,
            self.of.images.keys[samples],
            index.label[samples],
            result.average_precision.numpy(),
            result.average_precision_at_r.numpy(),
            result.first_positive.numpy(),
            index.class_name,
            result.neighbours.numpy(),
        )
        return Evaluation(figures, count, len(samples) - count, about, retrieved)


def seen_classes(train: Index, validation: Index) -> list[str]:
    """Return the names of the classes that are in both sets, sorted."""
    return sorted(set(train.class_name.tolist()) & set(validation.class_name.tolist()))


def refuse_seen_classes(train: Index, validation: ImageSet) -> None:
    """Raise a DistapError if a class of the validation set is trained on."""
    if seen := sorted(set(train.class_name.tolist()) & set(validation.classes.tolist())):
        raise DistapError(
            f"data.validation: {validation.name} shares {len(seen)} classes with the training set "
            f"({', '.join(seen[:3])}, ...), so its figures would not be of unseen classes; set "
            "data.unseen_classes=false if that is meant"
        )


@dataclass(frozen=True)
class GroundTruth:
    """Contents of a `ground_truth.json`."""

    dataset: str  # one of FIELDS
    query: str  # split of the queries
    gallery: tuple[str, ...]  # splits of the gallery
    queries: tuple[Mapping[str, Any], ...]


def read_ground_truth(path: Path) -> GroundTruth:
    """Read the ground truth that `distap data convert` wrote, or raise a DistapError."""
    with reading(path, "distap data convert"):
        found = json.loads(path.read_text())
        truth = GroundTruth(found["dataset"], found["query"], tuple(found["gallery"]), tuple(found["queries"]))
        for record in truth.queries:
            for name in FIELDS.get(truth.dataset, ()):
                record[name]
    if truth.dataset not in FIELDS:
        raise DistapError(f"{path}: dataset {truth.dataset!r} has no protocol here; expected {', '.join(FIELDS)}")
    for split in (truth.query, *truth.gallery):
        if not isinstance(split, str) or Path(split).name != split:
            raise DistapError(f"{path}: split {split!r} is not the name of a folder beside it")
    return truth


@dataclass(frozen=True)
class GroundTruthSet:
    """Queries and a gallery with a ground truth."""

    name: str
    truth: GroundTruth
    queries: ImageSet
    gallery: tuple[ImageSet, ...]  # the gallery's splits, then distractors

    def describe(self, describing: Describing) -> "DescribedGroundTruthSet":
        """Describe queries, each within its box, and gallery on all ranks; every rank gets all descriptors."""
        key = dict(zip(self.queries.classes.tolist(), self.queries.keys.tolist(), strict=True))
        absent = [record["name"] for record in self.truth.queries if record["name"] not in key]
        if absent:
            raise DistapError(f"{self.queries.name}: query {absent[0]} and {len(absent) - 1} more are not in it")
        boxes = {key[record["name"]]: record["box"] for record in self.truth.queries if "box" in record}
        samples, queries = describing.descriptors(self.queries, f"{self.name}/query", boxes or None)
        row = {name: place for place, name in enumerate(self.queries.classes[samples].tolist())}
        records = tuple(record for record in self.truth.queries if record["name"] in row)
        parts, names = [], []
        for number, images in enumerate(self.gallery):
            samples, descriptors = describing.descriptors(images, f"{self.name}/gallery-{number}")
            parts.append(descriptors)
            names += images.classes[samples].tolist()
        return DescribedGroundTruthSet(
            self,
            records,
            queries[[row[record["name"]] for record in records]],
            tuple(parts),
            {name: place for place, name in reversed(list(enumerate(names)))},
            describing.describer.device,
            describing.world,
            describing.folder(f"{self.name}/gallery"),
        )


@dataclass(frozen=True)
class DescribedGroundTruthSet:
    """Descriptors of the gallery, and of the queries that could be described, in the order of their records."""

    of: GroundTruthSet
    records: tuple[Mapping[str, Any], ...]  # of the Q queries
    queries: NDArray[Any]  # (Q, C)
    parts: tuple[NDArray[Any], ...]  # (N, C) together: the gallery's splits and distractors
    row: Mapping[str, int]  # of each gallery image by its name
    device: torch.device  # for ranking
    world: World  # ranks that share the ranking
    folder: Path | None  # to keep the joined gallery in

    @cached_property
    def gallery(self) -> NDArray[Any]:
        """(N, C), a memory map if its parts are; all ranks ask for it together."""
        if len(self.parts) == 1:
            return self.parts[0]
        if self.folder is None:
            return np.concatenate(self.parts)
        shape, path = (sum(map(len, self.parts)), self.parts[0].shape[1]), self.folder / DESCRIPTORS_FILE
        joined, place = None, 0
        if self.world.rank == 0:
            joined = new_descriptors(path, shape, self.parts[0].dtype)
            for part in self.parts:
                joined[place : place + len(part)] = part
                place += len(part)
        self.world.barrier()
        return on_all_ranks(self.world, joined, path)

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank the gallery for each query; all ranks call this."""
        refined, gallery, head = refinement.apply(self.queries, self.gallery)
        queries = torch.from_numpy(np.array(refined, dtype=np.float32)).to(self.device)
        ranked: dict[str, Any] = {"head": None if head is None else head.to(self.device), "world": self.world}
        if FIELDS[self.of.truth.dataset] is GRADED:
            result = evaluate_graded(queries, gallery, graded_queries(self.records, self.row), **ranked)
        else:
            result = evaluate_landmarks(queries, gallery, landmark_queries(self.records, self.row), **ranked)
        columns = {name: values.tolist() for name, values in result.average_precision.items()}
        about = {
            "data": self.of.name,
            "queries_without_positive_by_protocol": result.left_out,
            "protocol": self.of.truth.dataset,
            "refinement": refinement.name,
            "fingerprint": self.of.queries.fingerprint,
            "images": len(self.gallery),
            "average_precision": {
                str(record["name"]): nan_as_null({name: values[place] for name, values in columns.items()})
                for place, record in enumerate(self.records)
            },
        }
        return Evaluation(result.summary, len(self.records), max(result.left_out.values()), about)
