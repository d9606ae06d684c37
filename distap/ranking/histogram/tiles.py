"""Cut the similarities of a batch into tiles of images sorted by class.

Sorted, the images of a query's class are neighbours, so its positives are picked out of a tile and
not searched for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.ranking.device_copies import queued
from distap.ranking.gathered import PaddedColumns, runs
from distap.ranking.loss import Budget, DescriptorRows, LabelRows, strips

SameClass = PaddedColumns | None
MOST_COLUMNS = 2**20  # of a tile: float32 sums over longer rows would lose digits


@dataclass(frozen=True, eq=False)
class Images:
    """Images of the gallery, sorted by class."""

    descriptors: DescriptorRows
    # on the CPU, so that nobody waits for a device to know the size of a class
    labels: LabelRows
    positions: Int64[Tensor, " n"]  # in the gallery
    first_row: int  # row of the first image in the table of counts, if these are queries

    @staticmethod
    def of(
        descriptors: Float[Tensor, "m C"],
        labels: Int64[Tensor, " m"],
        chosen: Bool[Tensor, " m"],
        first_position: int,
        first_row: int = 0,
    ) -> "Images":
        """Choose images, which lie in the gallery from `first_position` on; sort them by class."""
        numbers = chosen.nonzero().flatten()
        order = numbers[labels[numbers].argsort(stable=True)]
        on_device = queued(order, descriptors.device)
        return Images(descriptors[on_device], labels[order], on_device + first_position, first_row)


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile: rows of queries against columns of gallery images."""

    queries: Images
    rows: slice
    gallery: Images  # whose images are the columns
    columns: slice
    mirrored: bool  # it stands for its mirror image, with the others as queries, as well

    @property
    def is_diagonal(self) -> bool:
        return self.queries is self.gallery and self.rows == self.columns

    @property
    def counts(self) -> slice:
        """Return this tile's queries as rows of a table with a row for each image of this rank."""
        return slice(
            self.queries.first_row + self.rows.start, self.queries.first_row + self.rows.stop
        )

    def mirror(self) -> "Tile":
        return Tile(self.gallery, self.columns, self.queries, self.rows, self.mirrored)

    def similarities(self) -> Float[Tensor, "r c"]:
        return self.queries.descriptors[self.rows] @ self.gallery.descriptors[self.columns].t()

    def same_class(self) -> SameClass:
        """Return the columns of each row's class, P at most, and which of them are no padding.

        Padding repeats a column. None if no pair of the tile is of one class.
        """
        # Both sides are sorted by class, and labels are on the CPU, so this waits for no device.
        of_rows = self.queries.labels[self.rows]
        of_columns = self.gallery.labels[self.columns]
        if of_rows[-1] < of_columns[0] or of_columns[-1] < of_rows[0]:
            return None
        columns, is_real = runs(of_columns, of_rows, self.queries.descriptors.device)
        return (columns, is_real) if columns.shape[1] else None


def tiles(queries: Images, gallery: Images, budget: Budget, mirrored: bool) -> Iterator[Tile]:
    """Yield tiles that cover each pair of a query and another image once."""
    pairs = budget.pairs(queries.descriptors.element_size())
    # Twice as wide as high: the matrix product is fastest on tiles that are about square.
    for rows in strips(0, len(queries.labels), max(1, int((pairs / 2) ** 0.5))):
        width = min(MOST_COLUMNS, max(1, pairs // (rows.stop - rows.start)))
        # Similarities are symmetric, so images against themselves need half of the products of a
        # whole square:
        #
        #     D d d d     D: a tile on the diagonal, which has each pair as (i, j) and as (j, i)
        #       D d d     d: mirrored, its pairs count for its rows and, transposed, for its columns
        #         D d
        #           D
        if queries is gallery:
            yield Tile(queries, rows, gallery, rows, mirrored=False)
        for columns in strips(rows.stop if queries is gallery else 0, len(gallery.labels), width):
            yield Tile(queries, rows, gallery, columns, mirrored)
