"""What each query counts for in the mean."""

from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered

Weights = Literal["uniform", "class"]


def class_sizes(gathered: Gathered) -> Int64[Tensor, " N"]:
    """Number of gallery images of the same class, of each gallery image."""
    _, inverse, counts = torch.unique(gathered.gallery_labels, return_inverse=True, return_counts=True)
    sizes: Tensor = counts[inverse]
    return sizes


def query_weights(gathered: Gathered, weights: Weights = "uniform") -> Float64[Tensor, " B"]:
    """Weights of the queries: they sum to 1, and a query without another image of its class has none.

    Args:
        gathered: the batch and its gallery.
        weights: `uniform`, every query the same; `class`, every class the same (Revaud et al. 2019, fig. 5).
    """
    weight = (class_sizes(gathered)[: len(gathered.labels)] > 1).double()
    if weights == "class":
        _, inverse, counts = torch.unique(gathered.labels, return_inverse=True, return_counts=True)
        weight = weight / counts[inverse]
    normalised: Tensor = weight / weight.sum()
    return normalised


def number_of_queries(gathered: Gathered) -> int:
    """Images of the batch that have another of their class in the gallery."""
    return int((query_weights(gathered) > 0).sum())


def require_queries(gathered: Gathered) -> None:
    """Refuse a batch in which there is nothing to rank.

    Raises:
        DistapError: no image has another of its class in the gallery, or all are of one class.
    """
    labels, rows = gathered.gallery_labels, len(gathered.labels)
    sizes = class_sizes(gathered)
    if not (sizes[:rows] > 1).any():
        raise DistapError(
            f"none of the {rows} images of this batch (rows 0 to {rows - 1}) has another image of its class in the "
            "batch, so nothing can be ranked: use `p_by_k` sampling, or a larger batch"
        )
    if sizes[0] == len(sizes):
        raise DistapError(
            f"all {rows} images of this batch (rows 0 to {rows - 1}) are of one class, {int(labels[0])}: every "
            "ranking of them is right, so there is nothing to learn; a batch needs two classes at least"
        )
