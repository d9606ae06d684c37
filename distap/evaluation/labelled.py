"""The labelled-set protocol on a data set: every image is a query against all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.data.images.image_sets import ImageSet
from distap.data.loading.reading import Reader
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.evaluation.describing import Describing
from distap.evaluation.saved import write_evaluation
from distap.retrieval.decomposability import DecomposabilityGap, decomposability_gap, random_batches
from distap.retrieval.metrics import AT, LabelledSetResult, evaluate_labelled_set
from distap.retrieval.refinement import PLAIN, Refinement
from distap.storage.locations import Source


@dataclass(frozen=True)
class LabelledSet:
    """Shards whose classes say which images match.

    Raises:
        DistapError: the images have no classes.
    """

    name: str
    images: ImageSet

    def __post_init__(self) -> None:
        if not isinstance(self.images.reader, Reader):
            raise DistapError(
                f"{self.images.name}: a plain folder of images, which says nothing of classes; pack it with "
                "`distap data pack`, a sub-folder a class"
            )

    @property
    def index(self) -> Index:
        """Of the shards."""
        assert isinstance(self.images.reader, Reader)
        return self.images.reader.index

    def describe(self, describing: Describing) -> "DescribedLabelledSet":
        """Its descriptors, on every rank."""
        samples, descriptors = describing.descriptors(self.images, self.name)
        return DescribedLabelledSet(self, samples, descriptors, describing.describer.device)


@dataclass(frozen=True)
class DescribedLabelledSet:
    """Descriptors of the n images of a labelled set that could be read."""

    of: LabelledSet
    samples: NDArray[np.int64]  # (n,) numbers in the data set, ascending
    descriptors: NDArray[Any]  # (n, C)
    device: torch.device  # that ranks them

    def evaluate(
        self, refinement: Refinement = PLAIN, neighbours: int = 10, at: Sequence[int] = AT
    ) -> "LabelledEvaluation":
        """Rank all images for each.

        Args:
            refinement: of the descriptors, before they are ranked.
            neighbours: most similar images to keep of each.
            at: the k of R@k and mP@k.
        Raises:
            DistapError: a descriptor is not finite, or no image has another of its class.
        """
        refined = refinement.apply(self.descriptors, self.descriptors, same=True)
        labels = torch.from_numpy(self.of.index.label[self.samples]).to(self.device)
        result = evaluate_labelled_set(
            refined.gallery,
            labels,
            neighbours,
            at=at,
            head=None if refined.head is None else refined.head.to(self.device),
            queries=None if refined.queries is refined.gallery else refined.queries,
        )
        on_cpu = LabelledSetResult(*(getattr(result, name).cpu() for name in LabelledSetResult.__dataclass_fields__))
        return LabelledEvaluation(self.of, refinement.name, on_cpu, torch.from_numpy(self.samples))

    def gap(self, batch: int) -> DecomposabilityGap:
        """How much more mAP promises within random batches of that size than over the whole set.

        Raises:
            DistapError: the set is smaller, or no batch has two images of a class.
        """
        labels = torch.from_numpy(self.of.index.label[self.samples]).to(self.device)
        batches = random_batches(len(labels), batch, torch.Generator().manual_seed(0))
        return decomposability_gap(self.descriptors, labels, batches)


@dataclass(frozen=True)
class LabelledEvaluation:
    """Figures on a labelled set. Rows of `result` are the samples that could be read, numbered in `samples`."""

    of: LabelledSet
    refinement: str
    result: LabelledSetResult
    samples: Tensor  # (N,) int64

    @property
    def figures(self) -> dict[str, float]:
        """Means over the queries by name, from 0 to 1."""
        return self.result.summary() | self.result.precision_at()

    @property
    def queries(self) -> int:
        """Images with another of their class."""
        return int(self.result.is_query.sum())

    @property
    def left_out(self) -> int:
        """Queries without a positive."""
        return self.result.without_positive

    def save(self, output: Path, **about: Any) -> Path:
        """Write output/result.json, and beside it what each image scored and retrieved; returns its path.

        Args:
            output: folder, which is made.
            about: what else result.json is to tell, such as the network's checkpoint.
        Raises:
            UnwritableError: it cannot be written.
        """
        result, index, samples = self.result, self.of.index, self.samples.numpy()
        figures = {
            **about,
            "data": self.of.images.name,
            "protocol": "labelled set",
            "refinement": self.refinement,
            "fingerprint": index.fingerprint,
            "images": len(samples),
            "queries": self.queries,
            "queries_without_positive": self.left_out,
            "figures": self.figures,
            "precision_at_recall": result.precision_at_recall.tolist(),
            "classes": self._classes(),
        }
        columns = {
            "sample": samples,
            "key": index.key[samples],
            "label": index.label[samples],
            "average_precision": result.average_precision.numpy(),
            "average_precision_at_r": result.average_precision_at_r.numpy(),
            "first_positive": result.first_positive.numpy(),
            "class_name": index.class_name,
            "neighbour": samples[result.neighbours.numpy()].ravel(),
        }
        return write_evaluation(output, figures, columns)

    def _classes(self) -> dict[str, dict[str, float]]:
        """Figures of each class that has queries, by its name."""
        of_class = self.result.of_classes(torch.from_numpy(self.of.index.label)[self.samples])
        names = self.of.index.class_name[of_class.classes.numpy()].tolist()
        rows = zip(
            of_class.queries.tolist(),
            of_class.mean_average_precision.tolist(),
            of_class.mean_average_precision_at_r.tolist(),
            of_class.recall[:, 0].tolist(),
            strict=True,
        )
        columns = ("queries", "mAP", "mAP@R", f"R@{int(self.result.at[0])}")
        return {name: dict(zip(columns, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def refuse_seen_classes(train: Index, validation: Index, source: Source) -> None:
    """Raise a DistapError where a class of the validation set is trained on."""
    seen = sorted(set(train.class_name.tolist()) & set(validation.class_name.tolist()))
    if seen:
        raise DistapError(
            f"data.validation: {source} shares {len(seen)} classes with the training set "
            f"({', '.join(seen[:3])}, ...), so its figures would not "
            "be of unseen classes; set data.unseen_classes=false if that is meant"
        )
