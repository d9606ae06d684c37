"""The similarities of a batch, cut in tiles of images sorted by class.

Sorted, the images of a query's class are neighbours, so that positives are picked out of a tile and not searched for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.ranking.budget import Budget


@dataclass(frozen=True, eq=False)
class Images:
    """Some images of the gallery, sorted by class."""

    descriptors: Float[Tensor, "n C"]
    labels: Int64[Tensor, " n"]  # on the CPU, so that nobody waits for a device to know the size of a class
    positions: Int64[Tensor, " n"]  # in the gallery
    first_row: int  # of the first one's counts, where they are queries

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(
        cls,
        descriptors: Float[Tensor, "m C"],
        labels: Int64[Tensor, " m"],
        which: Bool[Tensor, " m"],
        first_position: int,
        first_row: int = 0,
    ) -> "Images":
        """Those that `which` says; labels and which are on the CPU, and the gallery has them from first_position."""
        chosen = which.nonzero().flatten()
        order = chosen[labels[chosen].argsort(stable=True)]
        on_device = order.to(descriptors.device)
        return cls(descriptors[on_device], labels[order], on_device + first_position, first_row)


@dataclass(frozen=True)
class SameClass:
    """For each row of a tile, the columns of its class: P at most, and padding where there are fewer."""

    columns: Int64[Tensor, "r P"]
    is_real: Bool[Tensor, "r P"]  # False for padding

    def without_diagonal(self) -> Bool[Tensor, "r P"]:
        """Which are no padding, and not the row's own number."""
        rows = torch.arange(len(self.columns), device=self.columns.device)
        return self.is_real & (self.columns != rows[:, None])

    def add_to(self, table: Tensor, value: int | float) -> None:
        """Add a value in place where row and column are of one class."""
        # Padding repeats a column, so it adds nothing there.
        values = torch.zeros(self.columns.shape, dtype=table.dtype, device=table.device)
        table.scatter_add_(1, self.columns, values.masked_fill_(self.is_real, value))


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries against some images."""

    queries: Images
    rows: slice
    others: Images
    columns: slice
    mirrored: bool  # whether it stands for its mirror image, the others as queries, as well

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return length(self.rows), length(self.columns)

    @property
    def is_diagonal(self) -> bool:
        """Whether row k and column k are the same image."""
        return self.queries is self.others and self.rows == self.columns

    @property
    def counts(self) -> slice:
        """Where the queries' counts are, among those of all own images."""
        first = self.queries.first_row
        return slice(first + self.rows.start, first + self.rows.stop)

    def mirror(self) -> "Tile":
        """The same pairs, seen from the others."""
        return Tile(self.others, self.columns, self.queries, self.rows, self.mirrored)

    def similarities(self) -> Float[Tensor, "r c"]:
        """Of each pair."""
        return self.queries.descriptors[self.rows] @ self.others.descriptors[self.columns].t()

    def same_class(self) -> SameClass | None:
        """Where the pairs of one class are; None where there are none."""
        mine, theirs = self.queries.labels[self.rows], self.others.labels[self.columns]
        begin = torch.searchsorted(theirs, mine)
        size = torch.searchsorted(theirs, mine, right=True) - begin
        if not (most := int(size.max())):
            return None
        device = self.queries.descriptors.device
        place = torch.arange(most, device=device)
        columns = (begin.to(device)[:, None] + place).clamp_(max=len(theirs) - 1)
        return SameClass(columns, place < size.to(device)[:, None])


def triangle(own: Images, budget: Budget) -> Iterator[Tile]:
    """Images against themselves: the diagonal, and what is right of it."""
    for rows in strips(0, len(own), _height(own, budget)):
        yield Tile(own, rows, own, rows, mirrored=False)
        for columns in strips(rows.stop, len(own), _width(rows, own, budget)):
            yield Tile(own, rows, own, columns, mirrored=True)


def rectangle(queries: Images, others: Images, budget: Budget, mirrored: bool) -> Iterator[Tile]:
    """Images against others."""
    for rows in strips(0, len(queries), _height(queries, budget)):
        for columns in strips(0, len(others), _width(rows, queries, budget)):
            yield Tile(queries, rows, others, columns, mirrored)


def _height(queries: Images, budget: Budget) -> int:
    # Twice as wide as high: the matrix product is fastest on tiles that are about square.
    return max(1, int((budget.pairs(queries.descriptors.element_size()) / 2) ** 0.5))


def _width(rows: slice, queries: Images, budget: Budget) -> int:
    return budget.columns(length(rows), queries.descriptors.element_size())


def strips(start: int, stop: int, width: int) -> Iterator[slice]:
    """Cut a range in parts of about the same size, none wider than `width`."""
    parts = -(-(stop - start) // width)
    cuts = [start + part * (stop - start) // max(parts, 1) for part in range(parts + 1)]
    yield from map(slice, cuts[:-1], cuts[1:])


def length(rows: slice) -> int:
    """Number of rows."""
    return int(rows.stop - rows.start)
