"""The global batch as every rank holds it when it is ranked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from distap.errors import TIE_WIDTH, DistapError
from distap.randomness import seed_for
from distap.ranking.device_copies import queued
from distap.world import World

# For each of r rows its columns, P at most, and which of them are no padding.
PaddedColumns = tuple[Int64[Tensor, "r P"], Bool[Tensor, "r P"]]
QueryWeights = Literal["uniform", "class", "given"]
LOSS = 4  # first word of the key that seeds losses


def tie_width(dtype: torch.dtype) -> float:
    """Return the difference up to which rounding may have parted two equal similarities."""
    return TIE_WIDTH * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Gathered:
    """The global batch, the same on every rank, and which of its rows belong to this rank.

    Of the batch's slots, B take part: images that could be read and whose descriptor is finite.
    They are the queries. They are ranked against a gallery of N images: the batch itself, then the
    descriptors that a cross-batch memory remembers of earlier steps.
    """

    gallery: Float[Tensor, "N C"]  # the batch comes first
    gallery_levels: Int64[Tensor, "N L"]  # class numbers, from the finest level to the coarsest
    samples: Int64[Tensor, " B"]  # number of each image in its data set, -1 if unknown
    own: Int64[Tensor, " b"]  # positions of this rank's rows among the B, ascending
    taking_part: Bool[Tensor, " slots"]
    world: World
    # The slot at each place of an exchange, where place r + W i is row i of rank r; each rank's
    # slots ascend. None: the slot is the place. See `Plan.order`.
    order: Int64[Tensor, " slots"] | None = None
    # The row of each image of the batch in order of arrival; None: they have arrived in order.
    arrival: Int64[Tensor, " B"] | None = None
    key: tuple[int, int] = (0, 0)  # seed and step
    of_unit_length: bool = True  # an image's similarity to itself is constant
    # further tensors of the batch's images, (B, ...)
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    # of the descriptors before a loss converted them; None: as they are
    given_dtype: torch.dtype | None = None
    # Descriptors of the batch's images as queries, if they are not the gallery's first rows: then
    # queries and gallery are of two networks, and those of one of them are fixed, without gradient.
    other_queries: Float[Tensor, "B C"] | None = None
    fixed: Literal["queries", "gallery"] | None = None

    @property
    def tie_width(self) -> float:
        """Return the difference up to which similarities tie, by the descriptors' first type."""
        return tie_width(self.given_dtype or self.gallery.dtype)

    @property
    def seed(self) -> int:
        """Return the seed for random numbers of a loss, the same on every rank."""
        # By the labels too, since every call of `rank` without a step has step 0. Their sum may
        # overflow, and the key takes no number below 0.
        return seed_for(LOSS, *self.key, int(self.labels.sum()) & (2**63 - 1))

    @property
    def gallery_labels(self) -> Int64[Tensor, " N"]:
        return self.gallery_levels[:, 0]

    @property
    def descriptors(self) -> Float[Tensor, "B C"]:
        """Return the descriptors of the batch that get a gradient."""
        return self.queries if self.fixed == "gallery" else self.gallery[: len(self.samples)]

    @property
    def queries(self) -> Float[Tensor, "B C"]:
        if self.other_queries is None:
            return self.gallery[: len(self.samples)]
        return self.other_queries

    @property
    def labels(self) -> Int64[Tensor, " B"]:
        return self.gallery_labels[: len(self.samples)]

    @property
    def levels(self) -> Int64[Tensor, "B L"]:
        return self.gallery_levels[: len(self.samples)]

    def slots_of(self, rank: int) -> Int64[Tensor, " slots_of_rank"]:
        """Return the slots that a rank holds, ascending."""
        order = self.order
        if order is None:
            order = torch.arange(len(self.taking_part), device=self.taking_part.device)
        return order[rank :: self.world.size]

    @property
    def local(self) -> Bool[Tensor, " slots_of_rank"]:
        """Return which of this rank's slots take part in the ranking."""
        return self.taking_part[self.slots_of(self.world.rank)]

    def rows_of(self, arrived: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Return the gallery's rows of images by their places in order of arrival.

        The images of a memory arrive behind the batch, in their order.
        """
        if self.arrival is None:
            return arrived
        remembered = torch.arange(len(self.arrival), len(self.gallery), device=arrived.device)
        return torch.cat([self.arrival, remembered])[arrived]

    @cached_property
    def class_sizes(self) -> Int64[Tensor, "N L"]:
        """Return the number of gallery images in each image's class, at each level."""
        # Count in the gallery, not in the batch: a remembered image makes a lone one of the batch a
        # query.
        return torch.stack([_sizes(column) for column in self.gallery_levels.unbind(1)], dim=1)

    @cached_property
    def by_class(self) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
        """Return the gallery's labels in ascending order, and the images in that order."""
        return self.gallery_labels.sort(stable=True)

    def query_weights(
        self, weights: QueryWeights = "uniform", smallest: int = 2, level: int = 0
    ) -> Float64[Tensor, " B"]:
        """Return each query's weight in the mean; weights sum to 1.

        `uniform` weighs every query the same, `class` every class (Revaud et al. 2019, fig. 5), and
        `given` takes `extra["weights"]`. A query whose class at `level` holds fewer than `smallest`
        images has no weight.
        """
        weight = (self.class_sizes[: len(self.samples), level] >= smallest).double()
        if weights == "given":
            weight = weight * self._given_weights()
        elif weights == "class":
            weight = weight / _sizes(self.labels)
        if not weight.any():
            raise DistapError(
                "data.wrong_weights",
                "extra: weights: each image that has some is alone in its class",
            )
        return weight / weight.sum()

    def _given_weights(self) -> Float[Tensor, " B"]:
        weights = self.extra["weights"]
        is_positive = bool((weights >= 0).all()) and bool(0 < weights.sum() < torch.inf)
        if weights.shape != self.samples.shape or not is_positive:
            raise DistapError(
                "data.wrong_weights",
                "extra: weights have to be finite, one for each image, not below 0 and not all 0",
            )
        return weights

    def with_extra(self, extra: Mapping[str, Tensor]) -> "Gathered":
        """Add tensors of all ranks' images, given those (b, ...) of this rank's, by its slots."""
        return replace(self, extra={name: self._of_all(rows) for name, rows in extra.items()})

    def _of_all(self, rows: Shaped[Tensor, "slots_of_rank *K"]) -> Shaped[Tensor, "B *K"]:
        local_rows = rows.to(self.gallery.device)[self.local[: len(rows)]]
        # As bytes, because gloo does not know every type.
        whole = self.share(local_rows[:, None].flatten(1).contiguous().view(torch.uint8))
        return whole.view(local_rows.dtype).view(len(whole), *local_rows.shape[1:])

    def only(self, chosen: Bool[Tensor, " N"]) -> "Gathered":
        """Keep the chosen images of the gallery; the slots of the others take no part.

        The slots stay shared out among the ranks as they are, also where a rank is left with none.
        """
        of_batch = chosen[: len(self.samples)]
        taking_part = self.taking_part.clone()
        taking_part[self.taking_part] = of_batch
        row_of = of_batch.cumsum(0) - 1  # of each chosen image, without gaps
        arrival = self.arrival
        if arrival is not None:
            arrival = row_of[arrival[of_batch[arrival]]]
        return replace(
            self,
            gallery=self.gallery[chosen],
            gallery_levels=self.gallery_levels[chosen],
            samples=self.samples[of_batch],
            own=row_of[self.own[of_batch[self.own]]],
            taking_part=taking_part,
            arrival=arrival,
            extra={name: rows[of_batch] for name, rows in self.extra.items()},
            other_queries=None if self.other_queries is None else self.other_queries[of_batch],
        )

    def converted(self, convert: Callable[[Tensor], Tensor], **changes: Any) -> "Gathered":
        """Convert the descriptors of queries and gallery, as `convert` does rows (n, C)."""
        queries = None if self.other_queries is None else convert(self.other_queries)
        return replace(self, gallery=convert(self.gallery), other_queries=queries, **changes)

    def share(self, rows: Shaped[Tensor, "b *K"]) -> Shaped[Tensor, "B *K"]:
        """Gather the rows of all ranks, in the order of `descriptors`."""
        whole = self.world.gather_rows(self.spread(rows), len(self.taking_part), self.order)
        return whole[self.taking_part]

    def spread(
        self, rows: Shaped[Tensor, "b *K"], fill: float = 0.0
    ) -> Shaped[Tensor, "slots_of_rank *K"]:
        """Spread this rank's rows to its slots, with `fill` at slots that take no part."""
        # Collectives work by slots: they have equal shares on all ranks, and the rows that take
        # part may have not.
        if len(rows) == len(self.local):
            return rows
        full = rows.new_full((len(self.local), *rows.shape[1:]), fill)
        full[self.local] = rows
        return full

    def sum_own(self, rows: Float[Tensor, "B K"]) -> Float[Tensor, "b K"]:
        """Sum the ranks' tables and return this rank's rows of the sum."""
        if self.world.size == 1:
            return rows[self.own]
        # Slots, unlike the B rows, are shared out evenly, so that ranks need not tell each other
        # how many they have.
        full = rows.new_zeros(len(self.taking_part), rows.shape[1])
        full[self.taking_part] = rows
        return self.world.reduce_rows(full, self.order)[self.local]


def runs(
    labels: Int64[Tensor, " N"], wanted: Int64[Tensor, " r"], device: torch.device
) -> PaddedColumns:
    """Return the places of each wanted label among sorted labels, and which of them are no padding.

    P is the most places that one of them has; padding repeats any place.
    """
    # The places of one label are one run:
    #
    #     labels        2 2 3 5 5 5       begin  size
    #     wanted: 2     + + . . . .         0     2
    #     wanted: 4     . . . . . .         3     0
    #     wanted: 5     . . . + + +         3     3
    begin = torch.searchsorted(labels, wanted)
    size = torch.searchsorted(labels, wanted, right=True) - begin
    place = torch.arange(int(size.max()), device=device)
    places = (queued(begin, device)[:, None] + place).clamp_(max=len(labels) - 1)
    return places, place < queued(size, device)[:, None]


def _sizes(labels: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
    """Return how often each of the labels occurs."""
    _, classes, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    return counts[classes]
