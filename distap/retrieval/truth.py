"""The truth of each query: gallery rows that are right, and rows that do not count.

A truth gives tables for some queries at a time. Queries of one class share the list of its images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from distap.errors import DistapError

NONE = -1  # fills a table of gallery rows whose queries have different numbers of them


class Tables(NamedTuple):
    """Gallery rows that are right or ignored for each of q queries, padded with NONE."""

    positives: Int64[Tensor, "q P"]
    grades: Int64[Tensor, "q P"] | None  # of the positives; None if all are alike
    # rows to take out of the ranking, such as junk and the query itself
    ignored: Int64[Tensor, "q I"]


@dataclass(frozen=True)
class Truth:
    """Gallery rows that are right for each of Q queries, none twice; other rows are wrong."""

    gallery: int  # N
    positives: Sequence[Sequence[int] | NDArray[np.int64]]  # those of `own` do not count
    junk: Sequence[Sequence[int] | NDArray[np.int64]] | None = None
    # of each positive, such as 0 for easy and 1 for hard
    grades: Sequence[Sequence[int]] | None = None
    groups: Mapping[str, Sequence[int] | None] = field(default_factory=lambda: {"": None})
    """Grades that count as positive, by the prefix of their figures' names; None stands for all."""
    # Domain of each query, or other part of the queries; empty if there are no parts.
    parts: Sequence[str] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the tables
    # row of each query, which leaves itself out, or NONE; None: of no query
    own: Int64[Tensor, " Q"] | None = None
    # (Q, L) and (N, L) classes of each level; a positive's grade is the number of levels whose
    # class is the query's. To a group, positives of other grades are negatives then, and junk
    # without levels.
    levels: tuple[Int64[Tensor, "Q L"], Int64[Tensor, "N L"]] | None = None
    # query i is row i, and each of two images is right for the other or neither is
    is_symmetric: bool = False

    def __post_init__(self) -> None:
        if "mean" in self.parts:
            raise DistapError(
                "evaluation.part_named_mean",
                "no part or domain of queries may be called mean, as the figures over all parts"
                " are",
            )

    @cached_property
    def counts(self) -> Int64[Tensor, " Q"]:
        """Return the number of positives of each query."""
        counts = torch.tensor([*map(len, self.positives)], dtype=torch.int64, device=self.device)
        if self.own is None:
            return counts
        if self.is_symmetric and self.junk is None:  # each query is among those of its class
            return (counts - 1).clamp(min=0)
        lists_itself = [
            row in rows for row, rows in zip(self.own.tolist(), self.positives, strict=True)
        ]
        return counts - torch.tensor(lists_itself, dtype=torch.int64, device=self.device)

    @cached_property
    def order(self) -> Int64[Tensor, " Q"]:
        """Return the queries sorted by their first positive, so that those of a class are
        neighbours.
        """
        first = [rows[0] if len(rows) else NONE for rows in self.positives]
        return torch.tensor(first, device=self.device).argsort(stable=True)

    def tables(self, rows: Int64[Tensor, " q"]) -> Tables:
        chosen = rows.tolist()
        positives = padded([self.positives[row] for row in chosen], self.device)
        grades = None
        ignored = positives[:, :0]
        if self.grades is not None:
            grades = padded([self.grades[row] for row in chosen], self.device)
        if self.junk is not None:
            ignored = padded([self.junk[row] for row in chosen], self.device)
        if self.own is not None:
            own = self.own[rows, None]
            positives = positives.masked_fill(positives == own, NONE)
            ignored = torch.cat([ignored, own], dim=1)
        if self.levels is not None:
            query_labels = self.levels[0][rows, None]
            is_same = query_labels == self.levels[1][positives]
            grades = (is_same & (query_labels >= 0)).sum(2)
        return Tables(positives, grades, ignored)


def class_truth(
    queries: Int64[Tensor, "Q *L"],
    gallery: Int64[Tensor, "N *L"] | None = None,
    cameras: tuple[Int64[Tensor, " Q"], Int64[Tensor, " N"]] | None = None,
    parts: Sequence[str] = (),
) -> Truth:
    """Return the truth of a set with classes: images of the query's class are right.

    With labels of several levels, column 0 the finest, an image is right if the coarsest label is
    the query's. Its relevance is the number of labels that are.

    Args:
        queries: (Q,) or (Q, L) class of each query, below 0 for none. An image without a class is
            in the gallery, but right for no query.
        gallery: (N,) or (N, L) class of each gallery image; None if the queries are the gallery.
            Each then leaves itself out, by its row and never by its similarity.
        cameras: (Q,) and (N,) camera of each query and gallery image, below 0 for an unknown one.
            Images of a query's class and camera are junk.
        parts: see `Truth`.
    Raises:
        DistapError: no query has an image of its class in the gallery.
    """
    is_of_itself = gallery is None
    query_labels = queries.view(len(queries), -1)
    labels = query_labels if gallery is None else gallery.view(len(gallery), -1)
    rows = rows_by_class(labels[:, -1].cpu().numpy())
    none = np.empty(0, np.int64)
    positives = [
        rows.get(label, none) if label >= 0 else none for label in query_labels[:, -1].tolist()
    ]
    junk = None
    if cameras is not None:
        gallery_cameras = cameras[1].cpu().numpy()
        is_junk = [
            (gallery_cameras[right] == camera) & (camera >= 0)
            for right, camera in zip(positives, cameras[0].tolist(), strict=True)
        ]
        junk = [right[same] for right, same in zip(positives, is_junk, strict=True)]
        positives = [right[~same] for right, same in zip(positives, is_junk, strict=True)]
    levels = query_labels.shape[1]
    groups: dict[str, Sequence[int] | None] = {"": None}
    if levels > 1:
        # An image is right at a level if it has the query's label there, and so at all coarser
        # ones: its grade is at least the number of these levels. Of three levels:
        #
        #     ""          level 0, the finest: grade 3
        #     "level 1"   grades 2 and 3
        #     "level 2"   grades 1, 2 and 3
        groups = {f"level {k}" if k else "": range(levels - k, levels + 1) for k in range(levels)}
    truth = Truth(
        len(labels),
        positives,
        junk,
        groups=groups,
        parts=parts,
        device=queries.device,
        own=torch.arange(len(queries), device=queries.device) if is_of_itself else None,
        levels=(query_labels, labels) if queries.ndim == 2 else None,
        is_symmetric=is_of_itself,
    )
    if not bool(truth.counts.any()):
        problem = "queries has an image of its class in the gallery"
        if is_of_itself:
            problem = "images has another of its class"
        raise DistapError(
            "evaluation.no_positives",
            f"none of the {len(queries)} {problem}: there is nothing to retrieve",
        )
    return truth


def rows_by_class(classes: NDArray[Any]) -> dict[Any, NDArray[np.int64]]:
    """Return the rows of each class, ascending."""
    order = np.argsort(classes, kind="stable")
    names, starts = np.unique(classes[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True))


def padded(
    rows: Sequence[Sequence[int] | NDArray[Any]], device: torch.device
) -> Int64[Tensor, "q most"]:
    """Turn one list per query into one table, padded with NONE to at least one column."""
    table = np.full((len(rows), max([1, *map(len, rows)])), NONE, dtype=np.int64)
    for number, listed in enumerate(rows):
        table[number, : len(listed)] = listed
    return torch.from_numpy(table).to(device)
