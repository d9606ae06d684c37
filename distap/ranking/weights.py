"""What each query counts for in the mean."""

from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from distap.errors import DistapError

Weights = Literal["uniform", "class"]


def query_weights(labels: Int64[Tensor, " B"], weights: Weights = "uniform") -> Float64[Tensor, " B"]:
    """Weights of the queries: they sum to 1, and a query without another image of its class has none.

    Args:
        labels: class of each image of the batch.
        weights: `uniform`, every query the same; `class`, every class the same (Revaud et al. 2019, fig. 5).
    Raises:
        DistapError: no image of the batch has another of its class, so there is nothing to rank.
    """
    _, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    class_size = counts[inverse]
    is_query = class_size > 1
    require_queries(labels)
    weight: Tensor = is_query.double() / (class_size if weights == "class" else 1)
    return weight / weight.sum()


def require_queries(labels: Int64[Tensor, " B"]) -> None:
    """Raise a DistapError where no image has another of its class."""
    if len(torch.unique(labels)) == len(labels):
        raise DistapError(
            f"none of the {len(labels)} images of this batch has another image of its class in the batch, so "
            "nothing can be ranked: use `p_by_k` sampling, or a larger batch"
        )
