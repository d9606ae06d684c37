"""Protocols whose ground truth is a file: Revisited Oxford and Paris, Google Landmarks v2.

`distap data convert` writes that file beside the splits: which images of the gallery each query is to retrieve.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.data.images.image_sets import ImageSet
from distap.errors import DistapError
from distap.evaluation.describing import Describing
from distap.evaluation.saved import RESULT_FILE, as_json
from distap.retrieval.decomposability import DecomposabilityGap
from distap.retrieval.descriptor_files import DESCRIPTORS_FILE, new_descriptors
from distap.retrieval.graded import GradedResult, evaluate_graded, graded_queries
from distap.retrieval.landmarks import LandmarkResult, evaluate_landmarks, landmark_queries
from distap.retrieval.refinement import PLAIN, Refinement
from distap.storage.atomic import write_whole

GRADED = ("name", "box", "easy", "hard", "junk")
FIELDS = {"roxford5k": GRADED, "rparis6k": GRADED, "gldv2": ("name", "positives", "usage")}  # of a query's record


@dataclass(frozen=True)
class GroundTruth:
    """What a `ground_truth.json` says."""

    dataset: str  # one of FIELDS
    query: str  # split of the queries
    gallery: tuple[str, ...]  # splits of the gallery
    queries: tuple[Mapping[str, Any], ...]


def read_ground_truth(path: Path) -> GroundTruth:
    """The ground truth that `distap data convert` wrote.

    Raises:
        DistapError: it is not one, or of a data set whose protocol is unknown.
    """
    try:
        found = json.loads(path.read_text())
        truth = GroundTruth(found["dataset"], found["query"], tuple(found["gallery"]), tuple(found["queries"]))
        for record in truth.queries:
            for field in FIELDS.get(truth.dataset, ()):
                record[field]
        splits = (truth.query, *truth.gallery)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistapError(f"{path}: not a ground truth as `distap data convert` writes it: {error!r}") from error
    if truth.dataset not in FIELDS:
        raise DistapError(
            f"{path}: dataset {truth.dataset!r} has no protocol here; expected one of {', '.join(FIELDS)}"
        )
    for split in splits:
        if not isinstance(split, str) or Path(split).name != split:
            raise DistapError(f"{path}: split {split!r} is not the name of a folder beside it")
    return truth


@dataclass(frozen=True)
class JudgedSet:
    """Queries and a gallery, whose matches a ground truth names.

    Args:
        name: of the set.
        truth: the ground truth.
        queries: images of the query split.
        gallery: images of the gallery's splits, and of distractors behind them.
    """

    name: str
    truth: GroundTruth
    queries: ImageSet
    gallery: tuple[ImageSet, ...]

    def describe(self, describing: Describing) -> "DescribedJudgedSet":
        """Its descriptors, on every rank; of each query the part in its box."""
        key = dict(zip(self.queries.classes.tolist(), self.queries.keys.tolist(), strict=True))
        absent = [record["name"] for record in self.truth.queries if record["name"] not in key]
        if absent:
            raise DistapError(f"{self.queries.name}: query {absent[0]} and {len(absent) - 1} more are not in it")
        boxes = {key[record["name"]]: record["box"] for record in self.truth.queries if "box" in record}
        samples, queries = describing.descriptors(self.queries, f"{self.name}/query", boxes or None)
        row = {name: place for place, name in enumerate(self.queries.classes[samples].tolist())}
        judged = [record for record in self.truth.queries if record["name"] in row]
        parts, names = [], []
        for number, images in enumerate(self.gallery):
            samples, descriptors = describing.descriptors(images, f"{self.name}/gallery-{number}")
            parts.append(descriptors)
            names += images.classes[samples].tolist()
        return DescribedJudgedSet(
            self,
            tuple(judged),
            queries[[row[record["name"]] for record in judged]],
            tuple(parts),
            {name: place for place, name in reversed(list(enumerate(names)))},
            describing.describer.device,
            describing.folder(f"{self.name}/gallery"),
        )


@dataclass(frozen=True)
class DescribedJudgedSet:
    """Descriptors of the queries that could be read, in the order of their records, and of the gallery."""

    of: JudgedSet
    records: tuple[Mapping[str, Any], ...]  # of the Q queries
    queries: NDArray[Any]  # (Q, C)
    parts: tuple[NDArray[Any], ...]  # (N, C) together: the gallery, and distractors
    row: Mapping[str, int]  # of each image of the gallery by its name
    device: torch.device  # that ranks them
    folder: Path | None  # where descriptors are kept

    @cached_property
    def gallery(self) -> NDArray[Any]:
        """(N, C), in memory or in a file as its parts are."""
        return _joined(self.parts, self.folder)

    def evaluate(self, refinement: Refinement = PLAIN) -> "JudgedEvaluation":
        """Rank the gallery for each query.

        Args:
            refinement: of the descriptors, before they are ranked.
        Raises:
            DistapError: a descriptor is not finite, or an image of the ground truth is not in the gallery.
        """
        refined = refinement.apply(self.queries, self.gallery)
        queries = torch.from_numpy(np.array(refined.queries, dtype=np.float32)).to(self.device)
        head = None if refined.head is None else refined.head.to(self.device)
        result: GradedResult | LandmarkResult
        if FIELDS[self.of.truth.dataset] is GRADED:
            result = evaluate_graded(queries, refined.gallery, graded_queries(self.records, self.row), head=head)
        else:
            result = evaluate_landmarks(queries, refined.gallery, landmark_queries(self.records, self.row), head=head)
        return JudgedEvaluation(self.of, refinement.name, result, self.records, len(self.gallery))

    def gap(self, batch: int) -> DecomposabilityGap:
        """Raises a DistapError: a ground truth's queries and gallery are no batches."""
        raise DistapError(
            f"{self.of.name}: the decomposability gap over batches of {batch} is of shards with classes only"
        )


@dataclass(frozen=True)
class JudgedEvaluation:
    """Figures of a ground truth's queries."""

    of: JudgedSet
    refinement: str
    result: GradedResult | LandmarkResult
    records: tuple[Mapping[str, Any], ...]
    images: int  # of the gallery

    @property
    def figures(self) -> dict[str, float]:
        """Means over the queries by name, from 0 to 1."""
        return self.result.summary()

    @property
    def queries(self) -> int:
        """Those that could be read."""
        return len(self.records)

    @property
    def left_out(self) -> int:
        """Queries without a positive; of three protocols the most."""
        if isinstance(self.result, LandmarkResult):
            return self.result.left_out
        return max(part.left_out for part in (self.result.easy, self.result.medium, self.result.hard))

    def save(self, output: Path, **about: Any) -> Path:
        """Write output/result.json with the figures and each query's AP; returns its path.

        Args:
            output: folder, which is made.
            about: what else it is to tell, such as the network's checkpoint.
        Raises:
            UnwritableError: it cannot be written.
        """
        precision = {name: values.tolist() for name, values in self._average_precision().items()}
        record = {
            **about,
            "data": self.of.name,
            "protocol": self.of.truth.dataset,
            "refinement": self.refinement,
            "fingerprint": self.of.queries.fingerprint,
            "images": self.images,
            "queries": self.queries,
            "queries_without_positive": self.left_out,
            "figures": as_json(self.figures),
            "average_precision": {
                str(query["name"]): as_json({name: values[place] for name, values in precision.items()})
                for place, query in enumerate(self.records)
            },
        }
        path = output / RESULT_FILE
        write_whole(path, json.dumps(record, indent=1) + "\n")
        return path

    def _average_precision(self) -> dict[str, Tensor]:
        if isinstance(self.result, LandmarkResult):
            return {"AP@100": self.result.average_precision}
        parts = {"Easy": self.result.easy, "Medium": self.result.medium, "Hard": self.result.hard}
        return {name: part.average_precision for name, part in parts.items()}


def _joined(parts: Sequence[NDArray[Any]], folder: Path | None) -> NDArray[Any]:
    """One gallery of several; where those are kept in files, in a file too."""
    if len(parts) == 1:
        return parts[0]
    if folder is None:
        return np.concatenate(parts)
    shape = sum(map(len, parts)), parts[0].shape[1]
    joined = new_descriptors(folder / DESCRIPTORS_FILE, shape, parts[0].dtype)
    place = 0
    for part in parts:
        joined[place : place + len(part)] = part
        place += len(part)
    return joined
