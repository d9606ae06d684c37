"""The global batch as every rank sees it before ranking."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.distributed import World


@dataclass(frozen=True)
class Gathered:
    """Descriptors and labels of the whole global batch, and which of its rows are this rank's.

    Only rows that take part are in it: images that are damaged, or whose descriptor is not finite, are left
    out on all ranks alike. Of the `slots` rows of the batch, B take part.
    """

    descriptors: Float[Tensor, "B C"]
    labels: Int64[Tensor, " B"]
    own: Int64[Tensor, " b"]  # positions among the B of this rank's rows
    taking_part: Bool[Tensor, " slots"]
    world: World

    def share(self, rows: Float[Tensor, "b K"]) -> Float[Tensor, "B K"]:
        """Every rank's rows, in the order of `descriptors`."""
        return self.world.gather_rows(self.spread(rows), len(self.taking_part))[self.taking_part]

    def spread(self, rows: Float[Tensor, "b K"]) -> Float[Tensor, "slots_of_rank K"]:
        """The rows of all this rank's slots, zero for those that do not take part."""
        local = self.taking_part[self.world.rank :: self.world.size]
        full = rows.new_zeros(len(local), rows.shape[1])
        full[local] = rows
        return full

    def on_one_rank(self) -> "Gathered":
        """The same batch as a single process would hold it, all rows its own."""
        everything = torch.arange(len(self.labels), device=self.labels.device)
        return Gathered(self.descriptors, self.labels, everything, self.taking_part, World(device=self.world.device))


def gather(
    descriptors: Float[Tensor, "b C"],
    labels: Int64[Tensor, " b"],
    taking_part: Bool[Tensor, " b"],
    world: World,
    slots: int,
) -> Gathered:
    """Collect the descriptors and labels of all ranks, in slot order.

    Args:
        descriptors: those of this rank's slots; rows that do not take part may hold anything.
        labels: the classes of this rank's slots.
        taking_part: which of this rank's rows are ranked.
        world: the ranks; each holds the slots rank, rank + W, ...
        slots: number of rows of all ranks together.
    """
    facts = world.gather_rows(torch.stack([labels, taking_part.long()], dim=1), slots)
    everywhere = facts[:, 1].bool()
    every_descriptor = world.gather_rows(descriptors, slots)[everywhere]
    own_slots = torch.tensor(world.slots(slots), dtype=torch.int64, device=labels.device)
    position = everywhere.cumsum(0) - 1
    return Gathered(every_descriptor, facts[everywhere, 0], position[own_slots[taking_part]], everywhere, world)
