"""Evaluate descriptors that somebody else computed: `distap.evaluate`."""

from __future__ import annotations  # `help` shows the types as they are written here

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from distap.data.joined import numbered_apart
from distap.data.labels import class_name, class_numbers
from distap.errors import DistapError
from distap.evaluation.ground_truth import GroundTruth, Name, parsed_truth, read_truth
from distap.evaluation.query_values import QueryValues, values_by_query
from distap.ranking.rankable import refuse_crossing
from distap.retrieval.evaluate import Evaluated, evaluate_descriptors
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.ranks import Ties
from distap.retrieval.row_blocks import Descriptors, given_rows, open_parts, taken
from distap.retrieval.truth import Truth, class_truth
from distap.storage.names import composed


def evaluate(
    descriptors: ArrayLike | Tensor | Sequence[Tensor],
    labels: ArrayLike | Tensor | None = None,
    queries: ArrayLike | Tensor | None = None,
    *,
    truth: Mapping[str, Any] | Path | str | None = None,
    names: Sequence[str] | None = None,
    cameras: ArrayLike | Tensor | None = None,
    domains: ArrayLike | None = None,
    distractors: Sequence[Path | str] | Path | str = (),
    figures: Sequence[str] = (),
    dot_product: bool = False,
    ties: Ties = "against",
) -> dict[str, float]:
    """Compute exact retrieval figures from 0 to 1.

    The result also has the number of `queries` with an image of their class, and of the others,
    `left_out`.

    Args:
        descriptors: (N, C) of length 1.
        labels: (N,) numbers or texts, see `class_name`. An image without a class is right for no
            query. Or (N, L), the finest of L levels first: figures are of each (`level 1 mAP`),
            graded ones if `figures` name them.
        queries: (N,) bool, which images are queries against all that are not; None ranks, for each
            image, all others.
        truth: in place of labels, a file that says for each query what is right, or a mapping of
            its keys; see `distap.evaluation.ground_truth`. It names images by their rows, or as
            `names` does.
        names: (N,) names of the images for `truth`.
        cameras: (N,) camera of each image. Images of a query's class and camera are junk, as in
            re-identification.
        domains: (N,) domain of each image. A query's class is that of its domain. There are figures
            of the queries of each domain (`cars R@1`), and means over the domains (`mean R@1`), as
            in UnED.
        distractors: descriptors of any number of further images, which are right for no query and
            read in blocks: files (.npy, or HDF5 as ILIAS's extractor writes it), folders of them,
            or folders of `distap extract`.
        figures: names, see `distap.retrieval.figures`, such as mAP, mAP@R, mAP@1000, R@1, mP@5,
            mP@5/min, H-AP; by default those of the truth, or mAP, mAP@R, R@k and mP@k.
        dot_product: take descriptors of any length, and rank by the dot product.
        ties: `against` the query or `for` it: rank positives after or before the negatives of the
            same similarity. Similarities are the same up to 16 times the epsilon of their type, as
            in the losses.
    Raises:
        DistapError: shapes differ, a descriptor is not finite or not of length 1, a figure has no
            such name, or no query has an image of its class.
    """
    rows = given_rows(descriptors, dot_product=dot_product)
    if (labels is None) == (truth is None):
        raise DistapError("evaluation.labels_or_truth", "give either labels or a truth")
    _require_names(names, len(rows))
    is_query = None if queries is None else _query_mask(queries, len(rows))
    if labels is not None:
        asked, gallery, right = _labelled(rows, labels, is_query, cameras, domains)
        figures = figures or LABELLED_FIGURES
    elif cameras is not None or domains is not None:
        raise DistapError(
            "evaluation.labels_or_truth",
            "cameras and domains are for labels: a truth names junk and parts itself",
        )
    else:
        if isinstance(truth, Path | str):
            known = read_truth(Path(truth))
        else:
            known = parsed_truth(cast(Mapping[str, Any], truth), "truth")
        asked, gallery, right = _listed(known, rows, is_query, names)
        figures = figures or known.figures
    paths = [distractors] if isinstance(distractors, Path | str) else distractors
    evaluated = evaluate_descriptors(
        asked,
        gallery,
        right,
        figures,
        distractors=open_parts(paths, rows.shape[1], dot_product),
        ties=ties,
    )
    answered = int((evaluated.first_positive > 0).sum())
    left_out = len(evaluated.first_positive) - answered
    return evaluated.summary() | {"queries": answered, "left_out": left_out}


def evaluate_by_query(
    descriptors: ArrayLike | Tensor | Sequence[Tensor],
    labels: ArrayLike | Tensor,
    names: Sequence[str] | None = None,
    figures: Sequence[str] = (),
) -> tuple[Evaluated, QueryValues]:
    """Rank, for each image, all others, and return the result with the figures of each query.

    Args:
        descriptors, labels, figures: see `evaluate`.
        names: (N,) by which queries are compared; None takes the numbers of the rows.
    """
    rows = given_rows(descriptors)
    _require_names(names, len(rows))
    queries, gallery, right = _labelled(rows, labels, None, None, None)
    evaluated = evaluate_descriptors(queries, gallery, right, figures or LABELLED_FIGURES)
    keys = [str(name) for name in (range(len(rows)) if names is None else names)]
    # Of several levels the finest says which queries are alike.
    finest = _array(labels).reshape(len(rows), -1)[:, 0]
    classes = [class_name(label) for label in finest.tolist()]
    return evaluated, values_by_query([(slice(None), evaluated)], keys, classes)


def _require_names(names: Sequence[str] | None, count: int) -> None:
    if names is not None and len(names) != count:
        raise DistapError(
            "evaluation.wrong_shape", f"there are {len(names)} names for {count} descriptors"
        )


def _query_mask(queries: ArrayLike | Tensor, count: int) -> NDArray[np.bool_]:
    mask = np.asarray(queries.cpu() if isinstance(queries, Tensor) else queries)
    if mask.shape != (count,) or mask.dtype != bool or mask.all() or not mask.any():
        raise DistapError(
            "evaluation.wrong_shape",
            f"queries are {mask.shape} {mask.dtype}; expected ({count},) bool, some of them true,"
            " some false",
        )
    return mask


def _labelled(
    rows: Descriptors,
    labels: ArrayLike | Tensor,
    is_query: NDArray[np.bool_] | None,
    cameras: ArrayLike | Tensor | None,
    domains: ArrayLike | None,
) -> tuple[Descriptors, Descriptors, Truth]:
    """Return queries, gallery and truth of images with labels."""
    count = len(rows)
    device = torch.device(rows.device)
    numbers = _numbers(labels, "labels", count)
    camera = None
    if cameras is not None:
        camera = torch.from_numpy(_numbers(cameras, "cameras", count)).to(device)
    if numbers.ndim == 2:
        refuse_crossing(torch.from_numpy(numbers[(numbers >= 0).all(1)]))
    parts = np.empty(0, np.str_)
    if domains is not None:
        domain = _numbers(domains, "domains", count)
        numbers = numbered_apart(numbers, domain)
        texts = np.array(domains, np.str_).tolist()
        parts = np.where(domain < 0, "", [composed(text) for text in texts])
    classes = torch.from_numpy(numbers).to(device)
    if is_query is None:
        both = None if camera is None else (camera, camera)
        return rows, rows, class_truth(classes, None, both, parts.tolist())
    mask = torch.from_numpy(is_query).to(device)
    truth = class_truth(
        classes[mask],
        classes[~mask],
        None if camera is None else (camera[mask], camera[~mask]),
        parts[is_query[: len(parts)]].tolist(),
    )
    return taken(rows, mask.nonzero()[:, 0]), taken(rows, (~mask).nonzero()[:, 0]), truth


def _listed(
    truth: GroundTruth,
    rows: Descriptors,
    is_query: NDArray[np.bool_] | None,
    names: Sequence[str] | None,
) -> tuple[Descriptors, Descriptors, Truth]:
    """Return queries, gallery and truth of images that a ground truth lists."""
    row_names: list[Name] = [*range(len(rows))] if names is None else [*names]
    repeated = len(row_names) - len(set(row_names))
    if repeated:
        raise DistapError(
            "evaluation.repeated_name", f"names: {repeated} of {len(row_names)} are repeated"
        )
    if truth.instances and is_query is not None:
        raise DistapError(
            "evaluation.labels_or_truth",
            "queries are for images, and the truth has instances: its queries retrieve all others",
        )
    truth = truth.named_as(row_names, row_names)
    present = {*row_names, *truth.instances}
    missing = [query.name for query in truth.queries if query.name not in present]
    if missing:
        kind = "row numbers, since `names` is not given" if names is None else "texts of `names`"
        raise DistapError(
            "evaluation.missing_images",
            f"truth: query {missing[0]!r} and {len(missing) - 1} more are none of {kind}",
        )
    row_names, rows = truth.grouped(row_names, rows)
    _, queries = truth.asked(row_names, rows)
    gallery = rows
    if is_query is not None:
        kept = np.flatnonzero(~is_query)
        gallery = taken(rows, torch.from_numpy(kept))
        row_names = [row_names[row] for row in kept]
    device = torch.device(rows.device)
    return queries, gallery, truth.of_gallery(truth.queries, row_names, device, is_of_itself=True)


def _array(values: ArrayLike | Tensor) -> NDArray[Any]:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _numbers(values: ArrayLike | Tensor, name: str, count: int) -> NDArray[np.int64]:
    """Number (N,) or, of labels, (N, L) values of any kind; -1 stands for none."""
    array = _array(values)
    has_levels = name == "labels" and array.ndim == 2
    if array.ndim != 1 + has_levels or len(array) != count:
        raise DistapError(
            "evaluation.wrong_shape",
            f"{name} are {array.shape} for {count} descriptors; expected one for each",
        )
    try:
        columns = [class_numbers(column) for column in array.reshape(count, -1).T]
    except ValueError as error:
        raise DistapError("data.wrong_label", f"{name}: {error}") from error
    return np.stack(columns, axis=1).reshape(array.shape)
