"""The truth of each query: gallery rows that are right, and rows that do not count.

A truth gives tables for some queries at a time, so that a set of large classes needs no list for each image.
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
    ignored: Int64[Tensor, "q I"]  # rows to take out of the ranking, such as junk and the query itself


class ClassTruth:
    """The truth of a set with classes: images of the query's class are right.

    With labels of several levels, column 0 the finest, an image is right if the coarsest label is the query's. Its
    relevance is the number of labels that are.

    Args:
        queries: (Q,) or (Q, L) class of each query, below 0 for none. An image without a class is in the gallery, but
            right for no query.
        gallery: (N,) or (N, L) class of each gallery image; None if the queries are the gallery. Each then leaves
            itself out, by its row and never by its similarity.
        cameras: (Q,) and (N,) camera of each query and gallery image, below 0 for an unknown one. Images of a query's
            class and camera are junk.
        parts: see `ListedTruth`.
    Raises:
        DistapError: no query has an image of its class in the gallery.
    """

    def __init__(
        self,
        queries: Int64[Tensor, "Q *L"],
        gallery: Int64[Tensor, "N *L"] | None = None,
        cameras: tuple[Int64[Tensor, " Q"], Int64[Tensor, " N"]] | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.parts = parts
        self.own = torch.arange(len(queries), device=queries.device) if gallery is None else None
        self.is_graded, self._cameras = queries.ndim == 2, cameras
        asking, among = (one.view(len(one), -1) for one in (queries, queries if gallery is None else gallery))
        self._labels = asking, among
        levels, classes = asking.shape[1], asking[:, -1]
        # The grades that are right at each level; the finest is called "".
        self.groups: dict[str, Sequence[int] | None] = (
            {"": None}
            if levels == 1
            else {f"level {column}" if column else "": range(levels - column, levels + 1) for column in range(levels)}
        )
        self.order = classes.argsort(stable=True)  # of the queries, by class
        ascending, self._by_class = among[:, -1].sort(stable=True)
        self._start, members = _counted(classes, ascending)
        self._members = members.masked_fill(classes < 0, 0)
        # Images of a query's class that are junk, or the query itself.
        same = torch.full_like(classes, int(gallery is None))
        if cameras is not None:
            both = torch.cat(cameras).unique(return_inverse=True)[1]
            keys = [
                own * (len(both) + 1) + camera
                for own, camera in zip((classes, among[:, -1]), both.split([len(asking), len(among)]), strict=True)
            ]
            same = torch.where(cameras[0] < 0, same, _counted(keys[0], keys[1].sort().values)[1])
        self.counts = (self._members - same).clamp(min=0)  # (Q,) positives of each query
        self.gallery = len(among)  # N
        if not bool(self.counts.any()):
            whose = "images has another" if gallery is None else "queries has an image"
            where = "" if gallery is None else " in the gallery"
            raise DistapError(f"none of the {len(queries)} {whose} of its class{where}: there is nothing to retrieve")

    def tables(self, rows: Int64[Tensor, " q"]) -> Tables:
        own, count = rows[:, None], self._members[rows, None]
        number = torch.arange(max(int(count.max()), 1), device=rows.device).expand(len(rows), -1)
        place = (self._start[own] + number).clamp(max=self.gallery - 1)
        found = self._by_class[place].masked_fill(number >= count, NONE)
        ignored, grades = own[:, :0], None
        if self.own is not None:
            found, ignored = found.masked_fill(found == own, NONE), own
        if self._cameras is not None:
            is_junk = (self._cameras[0][own] == self._cameras[1][found]) & (self._cameras[0][own] >= 0)
            ignored = torch.cat([ignored, found.masked_fill(~is_junk, NONE)], dim=1)
            found = found.masked_fill(is_junk, NONE)
        if self.is_graded:
            ours, theirs = self._labels[0][own], self._labels[1][found]
            grades = ((ours == theirs) & (ours >= 0)).sum(2)
        return Tables(found, grades, ignored)


def _counted(
    wanted: Int64[Tensor, " Q"], ascending: Int64[Tensor, " N"]
) -> tuple[Int64[Tensor, " Q"], Int64[Tensor, " Q"]]:
    """Return the first place, and the count, of each wanted number in an ascending array."""
    sorted_, wanted = ascending.contiguous(), wanted.contiguous()
    start, end = (torch.searchsorted(sorted_, wanted, right=right) for right in (False, True))
    return start, end - start


@dataclass(frozen=True)
class ListedTruth:
    """The truth of a set with lists: gallery rows for each of Q queries, none twice; other rows are wrong."""

    gallery: int  # N
    positives: Sequence[Sequence[int] | NDArray[np.int64]]
    junk: Sequence[Sequence[int]] | None = None
    grades: Sequence[Sequence[int]] | None = None  # of each positive, such as 0 for easy and 1 for hard
    groups: Mapping[str, Sequence[int] | None] = field(default_factory=lambda: {"": None})
    """Grades that count as positive, by the prefix of their figures' names; None stands for all."""
    parts: Sequence[str] = ()  # domain of each query, or other part of the queries; none if there are no parts
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the tables
    own: Int64[Tensor, " Q"] | None = None  # row of each query, which leaves itself out, or NONE; None: of no query
    is_graded = False  # to a group, positives of other grades are junk

    @cached_property
    def counts(self) -> Int64[Tensor, " Q"]:
        """Return the number of positives of each query."""
        return torch.tensor([len(own) for own in self.positives], dtype=torch.int64, device=self.device)

    @cached_property
    def order(self) -> Int64[Tensor, " Q"]:
        return torch.arange(len(self.positives), device=self.device)

    def tables(self, rows: Int64[Tensor, " q"]) -> Tables:
        chosen = rows.tolist()
        positives, grades, junk = (
            None if lists is None else padded([lists[row] for row in chosen], self.device)
            for lists in (self.positives, self.grades, self.junk)
        )
        assert positives is not None
        ignored = positives[:, :0] if junk is None else junk
        own = ignored[:, :0] if self.own is None else self.own[rows, None]
        return Tables(positives, grades, torch.cat([ignored, own], dim=1))


Truth = ClassTruth | ListedTruth


def padded(rows: Sequence[Sequence[int] | NDArray[Any]], device: torch.device) -> Int64[Tensor, "q most"]:
    """Turn one list per query into one table, padded with NONE to at least one column."""
    table = np.full((len(rows), max([1, *map(len, rows)])), NONE, dtype=np.int64)
    for number, own in enumerate(rows):
        table[number, : len(own)] = own
    return torch.from_numpy(table).to(device)
