"""Measure by how much AP within batches overstates AP: the decomposability gap (Ramzi et al. 2021, eq. 6)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.metrics import evaluate_labelled_set


@dataclass(frozen=True)
class DecomposabilityGap:
    """Mean over batches of the mAP within the batch, and the mAP over the whole set."""

    within_batches: float
    whole: float
    batches: int  # in which some image has another of its class
    left_out: int  # the other batches

    @property
    def gap(self) -> float:
        """How much greater mAP is within batches. It is positive, since a batch holds fewer negatives."""
        return self.within_batches - self.whole


def decomposability_gap(
    descriptors: Tensor | NDArray[Any],
    labels: Int64[Tensor, " N"],
    batches: Iterable[Tensor | NDArray[np.int64]],
) -> DecomposabilityGap:
    """Evaluate each batch as a labelled set of its own, and the whole set.

    Args:
        descriptors: (N, C) of length 1; a tensor or an array.
        labels: class of each image, -1 for none.
        batches: rows of each batch, of any sizes, such as `random_batches` gives.
    Raises:
        DistapError: no batch has two images of a class.
    """
    values, left_out = [], 0
    for rows in batches:
        batch = torch.as_tensor(rows, device=labels.device)
        own = labels[batch]
        if not bool((own[own >= 0].unique(return_counts=True)[1] > 1).any()):
            left_out += 1
            continue
        described = descriptors[batch] if isinstance(descriptors, Tensor) else descriptors[batch.cpu().numpy()]
        values.append(evaluate_labelled_set(described, own, 0).summary()["mAP"])
    if not values:
        raise DistapError(f"none of {left_out} batches has two images of a class: take greater batches")
    whole = evaluate_labelled_set(descriptors, labels, 0).summary()["mAP"]
    return DecomposabilityGap(float(np.mean(values)), whole, len(values), left_out)


def random_batches(images: int, batch: int, generator: torch.Generator) -> Iterator[Int64[Tensor, " B"]]:
    """Rows of batches that split the images at random; images that do not fill a batch are in none."""
    if batch > images:
        raise DistapError(f"a batch of {batch} images from a set of {images}; take smaller batches")
    order = torch.randperm(images, generator=generator)
    return iter(order[: images - images % batch].view(-1, batch))
