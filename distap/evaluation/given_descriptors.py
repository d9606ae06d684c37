"""Evaluate descriptors that somebody else computed: `distap.evaluate`."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from distap.data.labels import class_numbers
from distap.errors import DistapError
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import labelled_figures
from distap.retrieval.ranks import Ties
from distap.retrieval.row_blocks import given_rows, taken
from distap.retrieval.truth import ClassTruth


def evaluate(
    descriptors: ArrayLike | Tensor | Sequence[Tensor],
    labels: ArrayLike | Tensor,
    queries: ArrayLike | Tensor | None = None,
    *,
    figures: Sequence[str] = labelled_figures(),
    dot_product: bool = False,
    ties: Ties = "against",
) -> dict[str, float]:
    """Compute exact retrieval figures from 0 to 1.

    The result also has the number of `queries` with an image of their class, and of the others, `left_out`.

    Args:
        descriptors: (N, C) of length 1.
        labels: (N,) numbers or texts, see `class_name`. An image without a class is right for no query.
        queries: (N,) bool, which images are queries against all that are not; None ranks, for each image, all others.
        figures: names, see `distap.retrieval.figures`, such as mAP, mAP@R, mAP@1000, R@1, mP@5, mP@5/min.
        dot_product: take descriptors of any length, and rank by the dot product.
        ties: `against` the query or `for` it: rank positives after or before the negatives of the same similarity.
            Similarities are the same up to 16 times the epsilon of their type, as in the losses.
    Raises:
        DistapError: shapes differ, a descriptor is not finite or not of length 1, a figure has no such name, or no
            query has an image of its class.
    """
    rows = given_rows(descriptors, dot_product=dot_product)
    names = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if names.shape != (len(rows),):
        raise DistapError(f"descriptors are {tuple(rows.shape)} and labels {names.shape}; expected (N, C) and (N,)")
    try:
        classes = torch.from_numpy(class_numbers(names)).to(torch.device(rows.device))
    except ValueError as error:
        raise DistapError(f"labels: {error}") from error
    asking, truth = rows, ClassTruth(classes)
    if queries is not None:
        asks = queries.cpu().numpy() if isinstance(queries, Tensor) else np.asarray(queries)
        if asks.shape != names.shape or asks.dtype != bool or asks.all() or not asks.any():
            raise DistapError(
                f"queries are {asks.shape} {asks.dtype}; expected ({len(rows)},) bool, some of them true, some false"
            )
        mask = torch.from_numpy(asks).to(classes.device)
        asking, rows = (taken(rows, some.nonzero()[:, 0]) for some in (mask, ~mask))
        truth = ClassTruth(classes[mask], classes[~mask])
    found = evaluate_descriptors(asking, rows, truth, figures, ties=ties)
    return found.summary() | {"queries": int(found.is_query.sum()), "left_out": int((~found.is_query).sum())}
