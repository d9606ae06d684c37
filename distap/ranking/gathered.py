"""The global batch as every rank sees it before ranking."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.world import World


@dataclass(frozen=True)
class Gathered:
    """Descriptors and labels of the whole global batch, and which of its rows are this rank's.

    Only rows that take part are in it: images that are damaged, or whose descriptor is not finite, are left
    out on all ranks alike. Of the `slots` rows of the batch, B take part. They are the queries; they are ranked
    against a gallery of N: themselves, then what a cross-batch memory remembers of earlier steps.
    """

    gallery: Float[Tensor, "N C"]  # the batch comes first
    gallery_labels: Int64[Tensor, " N"]
    images: Int64[Tensor, " B"]  # number of each image in its data set, -1 where unknown
    own: Int64[Tensor, " b"]  # positions among the B of this rank's rows
    taking_part: Bool[Tensor, " slots"]
    world: World

    @property
    def descriptors(self) -> Float[Tensor, "B C"]:
        """Those of the batch."""
        return self.gallery[: len(self.images)]

    @property
    def labels(self) -> Int64[Tensor, " B"]:
        """Those of the batch."""
        return self.gallery_labels[: len(self.images)]

    def share(self, rows: Float[Tensor, "b *K"]) -> Float[Tensor, "B *K"]:
        """Every rank's rows, in the order of `descriptors`."""
        return self.world.gather_rows(self.spread(rows), len(self.taking_part))[self.taking_part]

    def spread(self, rows: Float[Tensor, "b *K"], fill: float = 0.0) -> Float[Tensor, "slots_of_rank *K"]:
        """The rows of all this rank's slots, `fill` for those that do not take part."""
        local = self.taking_part[self.world.rank :: self.world.size]
        full = rows.new_full((len(local), *rows.shape[1:]), fill)
        full[local] = rows
        return full

    def sum_own(self, rows: Float[Tensor, "B K"]) -> Float[Tensor, "b K"]:
        """This rank's rows of the sum of all ranks' tables."""
        if self.world.size == 1:
            return rows[self.own]
        full = rows.new_zeros(len(self.taking_part), rows.shape[1])
        full[self.taking_part] = rows
        local = self.taking_part[self.world.rank :: self.world.size]
        return self.world.reduce_rows(full)[local]

    def on_one_rank(self) -> "Gathered":
        """The same batch as a single process would hold it, all rows its own."""
        everything = torch.arange(len(self.images), device=self.images.device)
        return replace(self, own=everything, world=World(device=self.world.device))


def gather(
    descriptors: Float[Tensor, "b C"],
    labels: Int64[Tensor, " b"],
    taking_part: Bool[Tensor, " b"],
    world: World,
    slots: int,
    images: Int64[Tensor, " b"] | None = None,
) -> Gathered:
    """Collect the descriptors and labels of all ranks, in slot order.

    Args:
        descriptors: those of this rank's slots; rows that do not take part may hold anything.
        labels: the classes of this rank's slots.
        taking_part: which of this rank's rows are ranked.
        world: the ranks; each holds the slots rank, rank + W, ...
        slots: number of rows of all ranks together.
        images: number of each image in its data set, for a cross-batch memory to know it again.
    """
    known = images if images is not None else torch.full_like(labels, -1)
    facts = world.gather_rows(torch.stack([labels, known, taking_part.long()], dim=1), slots)
    everywhere = facts[:, 2].bool()
    every_descriptor = world.gather_rows(descriptors, slots)[everywhere]
    own_slots = torch.tensor(world.slots(slots), dtype=torch.int64, device=labels.device)
    position = everywhere.cumsum(0) - 1
    return Gathered(
        every_descriptor,
        facts[everywhere, 0],
        facts[everywhere, 1],
        position[own_slots[taking_part]],
        everywhere,
        world,
    )
