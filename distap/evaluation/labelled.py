"""Evaluate a labelled set: every image is a query against all others."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.evaluation.describing import Describing
from distap.evaluation.saved import Evaluation, Retrieved
from distap.retrieval.metrics import DecomposabilityGap, decomposability_gap, evaluate_labelled_set, random_batches
from distap.retrieval.refinement import PLAIN, Refinement
from distap.storage.locations import Source


@dataclass(frozen=True)
class LabelledSet:
    """Shards whose classes say which images match."""

    name: str
    images: ImageSet
    index: Index  # of the shards

    def describe(self, describing: Describing) -> "DescribedLabelledSet":
        """Describe the images on all ranks; every rank gets all descriptors."""
        samples, descriptors = describing.descriptors(self.images, self.name)
        return DescribedLabelledSet(self, samples, descriptors, describing.describer.device)


@dataclass(frozen=True)
class DescribedLabelledSet:
    """Descriptors of the n images of a labelled set that could be described."""

    of: LabelledSet
    samples: NDArray[np.int64]  # (n,) image numbers, ascending
    descriptors: NDArray[Any]  # (n, C)
    device: torch.device  # for ranking

    def evaluate(self, refinement: Refinement = PLAIN) -> Evaluation:
        """Refine the descriptors and rank all images for each image."""
        index, samples = self.of.index, self.samples
        queries, gallery, head = refinement.apply(self.descriptors, self.descriptors, same=True)
        labels, device = torch.from_numpy(index.label[samples]), self.device
        head, asking = None if head is None else head.to(device), None if queries is gallery else queries
        result = evaluate_labelled_set(gallery, labels.to(device), head=head, queries=asking)
        result = replace(result, **{name: getattr(result, name).cpu() for name in result.__dataclass_fields__})
        count = int(result.is_query.sum())
        about = {
            "data": self.of.images.name,
            "protocol": "labelled set",
            "refinement": refinement.name,
            "fingerprint": index.fingerprint,
            "images": len(samples),
            "precision_at_recall": result.precision_at_recall.tolist(),
            "classes": {str(index.class_name[row]): own for row, own in result.class_figures(labels).items()},
        }
        retrieved = Retrieved(
            samples,
            index.key[samples],
            index.label[samples],
            result.average_precision.numpy(),
            result.average_precision_at_r.numpy(),
            result.first_positive.numpy(),
            index.class_name,
            result.neighbours.numpy(),
        )
        return Evaluation(result.summary(), count, len(samples) - count, about, retrieved)

    def gap(self, batch: int) -> DecomposabilityGap:
        """How much higher mAP is within random batches of this size than over the whole set."""
        labels = torch.from_numpy(self.of.index.label[self.samples]).to(self.device)
        batches = random_batches(len(labels), batch, torch.Generator().manual_seed(0))
        return decomposability_gap(self.descriptors, labels, batches)


def refuse_seen_classes(train: Index, validation: Index, source: Source) -> None:
    """Raise a DistapError if a class of the validation set is trained on."""
    seen = sorted(set(train.class_name.tolist()) & set(validation.class_name.tolist()))
    if seen:
        raise DistapError(
            f"data.validation: {source} shares {len(seen)} classes with the training set ({', '.join(seen[:3])}, "
            "...), so its figures would not be of unseen classes; set data.unseen_classes=false if that is meant"
        )
