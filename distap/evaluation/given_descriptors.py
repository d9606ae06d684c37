"""Evaluate descriptors that somebody else computed: `distap.evaluate`."""

from __future__ import annotations  # `help` shows the types as they are written here

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from distap.data.labels import class_numbers
from distap.errors import DistapError
from distap.evaluation.ground_truth import GroundTruth, Name, parsed_truth, read_truth
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
        descriptors: (N, C) of length 1. labels: (N,) numbers or texts, see `class_name`. An image
            without a class is right for no query. Or (N, L),
            the finest of L levels first: figures are of each (`level 1 mAP`), graded ones if
                `figures` name them.
        queries: (N,) bool, which images are queries against all that are not; None ranks, for each
            image, all others. truth: in place of labels, a file that says for each query what is
            right, or a mapping of its keys; see
            `distap.evaluation.ground_truth`. It names images by their rows, or as `names` does.
        names: (N,) names of the images for `truth`. cameras: (N,) camera of each image. Images of a
            query's class and camera are junk, as in re-identification. domains: (N,) domain of each
            image. A query's class is that of its domain. There are figures of the queries of
            each domain (`cars R@1`), and means over the domains (`mean R@1`), as in UnED.
        distractors: descriptors of any number of further images, which are right for no query and
            read in blocks:
            files (.npy, or HDF5 as ILIAS's extractor writes it), folders of them, or folders of
            `distap extract`.
        figures: names, see `distap.retrieval.figures`, such as mAP, mAP@R, mAP@1000, R@1, mP@5,
            mP@5/min, H-AP; by default those of the truth, or mAP, mAP@R, R@k and mP@k.
        dot_product: take descriptors of any length, and rank by the dot product. ties: `against`
            the query or `for` it: rank positives after or before the negatives of the same
            similarity.
            Similarities are the same up to 16 times the epsilon of their type, as in the losses.
    Raises:
        DistapError: shapes differ, a descriptor is not finite or not of length 1, a figure has no
            such name, or no query has an image of its class.
    """
    rows = given_rows(descriptors, dot_product=dot_product)
    if (labels is None) == (truth is None):
        raise DistapError("give either labels or a truth")
    asks = (
        None
        if queries is None
        else np.asarray(queries.cpu() if isinstance(queries, Tensor) else queries)
    )
    if asks is not None and (
        asks.shape != (len(rows),) or asks.dtype != bool or asks.all() or not asks.any()
    ):
        expected = f"({len(rows)},) bool, some of them true, some false"
        raise DistapError(f"queries are {asks.shape} {asks.dtype}; expected {expected}")
    paths = [distractors] if isinstance(distractors, Path | str) else distractors
    rest: dict[str, Any] = {
        "distractors": open_parts(paths, rows.shape[1], dot_product),
        "ties": ties,
    }
    if truth is not None:
        if cameras is not None or domains is not None:
            raise DistapError(
                "cameras and domains are for labels: a truth names junk and parts itself"
            )
        known = (
            read_truth(Path(truth))
            if isinstance(truth, Path | str)
            else parsed_truth(truth, "truth")
        )
        return _summary(
            evaluate_descriptors(
                *_listed(known, rows, asks, names), figures or known.figures, **rest
            )
        )
    classes, camera, domain = (
        None if values is None else _numbers(values, what, len(rows)).to(torch.device(rows.device))
        for values, what in ((labels, "labels"), (cameras, "cameras"), (domains, "domains"))
    )
    assert classes is not None
    if classes.ndim == 2:
        refuse_crossing(classes[(classes >= 0).all(1)])
    texts = np.array([] if domains is None else domains, np.str_).tolist()
    parts = np.array(list(map(composed, texts)), np.str_)  # of the queries
    if domain is not None:
        of_levels = domain[:, None] if classes.ndim == 2 else domain
        # One number for class and domain: domains are numbered below N + 1, so no two pairs share
        # one.
        classes = (classes * (len(rows) + 1) + of_levels).masked_fill(
            (classes < 0) | (of_levels < 0), -1
        )
        parts[domain.cpu().numpy() < 0] = ""
    figures = figures or LABELLED_FIGURES
    if asks is None:
        by_class = class_truth(
            classes, None, None if camera is None else (camera, camera), parts.tolist()
        )
        return _summary(evaluate_descriptors(rows, rows, by_class, figures, **rest))
    mask = torch.from_numpy(asks).to(classes.device)
    asking, among = (taken(rows, some.nonzero()[:, 0]) for some in (mask, ~mask))
    by_camera = None if camera is None else (camera[mask], camera[~mask])
    by_class = class_truth(
        classes[mask], classes[~mask], by_camera, parts[asks[: len(parts)]].tolist()
    )
    return _summary(evaluate_descriptors(asking, among, by_class, figures, **rest))


def _listed(
    known: GroundTruth,
    rows: Descriptors,
    asks: NDArray[np.bool_] | None,
    names: Sequence[str] | None,
) -> tuple[Descriptors, Descriptors, Truth]:
    """Return queries, gallery and truth."""
    if names is not None and len(names) != len(rows):
        raise DistapError(f"there are {len(names)} names for {len(rows)} descriptors")
    of_rows: list[Name] = [*range(len(rows))] if names is None else [*names]
    repeated = len(of_rows) - len(set(of_rows))
    if repeated:
        raise DistapError(f"names: {repeated} of {len(of_rows)} are repeated")
    if known.instances and asks is not None:
        raise DistapError(
            "queries are for images, and the truth has instances: its queries retrieve all others"
        )
    known = known.named_as(of_rows, of_rows)
    there = {*of_rows, *known.instances}
    missing = [query.name for query in known.queries if query.name not in there]
    if missing:
        kind = "row numbers, since `names` is not given" if names is None else "texts of `names`"
        raise DistapError(
            f"truth: query {missing[0]!r} and {len(missing) - 1} more are none of {kind}"
        )
    of_rows, rows = known.grouped(of_rows, rows)
    _, asking = known.asking(of_rows, rows)
    kept = np.arange(len(rows)) if asks is None else np.flatnonzero(~asks)
    gallery = rows if asks is None else taken(rows, torch.from_numpy(kept))
    device = torch.device(rows.device)
    among = [of_rows[place] for place in kept]
    return asking, gallery, known.of_gallery(known.queries, among, device, is_of_itself=True)


def _summary(found: Evaluated) -> dict[str, float]:
    queries = int((found.first_positive > 0).sum())
    return found.summary() | {"queries": queries, "left_out": len(found.first_positive) - queries}


def _numbers(values: ArrayLike | Tensor, what: str, count: int) -> Tensor:
    """Number (N,) or, of labels, (N, L) values of any kind; -1 stands for none."""
    names = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if not (
        names.shape == (count,) or (what == "labels" and names.ndim == 2 and len(names) == count)
    ):
        raise DistapError(
            f"{what} are {names.shape} for {count} descriptors; expected one for each"
        )
    try:
        columns = [class_numbers(column) for column in names.reshape(count, -1).T]
    except ValueError as error:
        raise DistapError(f"{what}: {error}") from error
    return torch.from_numpy(np.stack(columns, axis=1).reshape(names.shape))
