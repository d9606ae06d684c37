"""Gather a global batch from all ranks in chunks, while the network goes on describing."""

from collections import deque

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.ranking.device_copies import ToHost, queued
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Counter, DescriptorRows, FlagRows, LabelRows, full_precision, strips
from distap.world import Arrival, World

# Chunks of a share, and rows of a rank in a chunk: small ones leave early, but each costs a
# message's latency.
MOST_CHUNKS = 8
LEAST_SENT = 64
# Rows of a rank that are counted at once; fewer make small tiles, 10% slower at 512.
LEAST_COUNTED = 1024
# Columns of the facts of a row; labels of all levels follow.
SAMPLE = 0
TAKES_PART = 1
FINEST_LABEL = 2


class Gathering:
    """Collect a batch: `add` rows as they are described, then `finish`.

    Every rank adds its own rows in their order, as many at a time as it likes. Rows travel packed,
    a chunk in one collective, which starts when this rank has all its rows of the chunk; nothing
    waits before `finish`:

        | sample | takes part | label of each level |  d_1 ... d_C  |

    The facts left of the descriptor are int64 bits in the descriptors' dtype.

    Of the `slots` rows, each rank holds those at the places rank, rank + W, ... of an exchange:
    the slots of these numbers, or of the numbers that `order` has there. `counter` takes the rows
    that have arrived, some chunks at a time.
    """

    def __init__(
        self,
        world: World,
        slots: int,
        counter: Counter | None = None,
        order: Int64[Tensor, " slots"] | None = None,
    ) -> None:
        self.world = world
        self.slots = slots
        self.counter = counter
        self.order = order
        self._slot_at = torch.arange(slots) if order is None else order
        self._own_rows = len(world.slots(slots))
        self._share = -(-slots // world.size)
        self._unsent = deque(
            strips(0, self._share, max(LEAST_SENT, -(-self._share // MOST_CHUNKS)))
        )
        self._on_the_way = deque[Arrival]()
        # chunks whose facts are on their way to the CPU
        self._landed = deque[tuple[Tensor, ToHost]]()
        self.arrived = 0  # rows of all ranks
        self._counted = 0  # of these, rows that the counter has seen
        # Rows of images taking part that it has not seen.
        self._uncounted = list[DescriptorRows]()
        self._filled = 0  # own rows that were added
        self._packed: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        descriptors: DescriptorRows,
        labels: LabelRows | Int64[Tensor, "n L"],
        taking_part: FlagRows,
        samples: LabelRows,
    ) -> None:
        """Add this rank's next rows; rows whose descriptor is not finite take no part.

        Labels are (n,), or (n, L) from the finest level to the coarsest. Labels, taking_part and
        samples may be on the CPU: they cross to the descriptors' device together.
        """
        facts = torch.column_stack([samples, taking_part.long(), labels])
        facts = queued(facts, descriptors.device)
        # NaN and infinity times 0 are NaN, and a sum is ten times as fast as a look at each value.
        facts[:, TAKES_PART] *= (descriptors * 0).sum(dim=1) == 0
        # Facts travel as bits: as numbers, float32 would round labels beyond 2^24.
        rows = torch.cat([facts.view(descriptors.dtype), descriptors], dim=1)
        if self._packed is None:
            self._packed = rows.new_zeros(self._share, rows.shape[1])
            self._gallery = descriptors.new_empty(self.slots, descriptors.shape[1])
            self._facts = torch.empty(self.slots, facts.shape[1], dtype=torch.int64)
        # Each row is written once, since a chunk on its way must not change.
        self._packed[self._filled : self._filled + len(rows)] = rows
        self._filled += len(rows)
        # Chunks have the same rows on every rank, whatever the micro-batches: collectives have to
        # begin in one order. A rank with one row less than others leaves the last row of its last
        # chunk zero: it takes no part.
        while self._unsent and min(self._unsent[0].stop, self._own_rows) <= self._filled:
            self._on_the_way.append(self.world.start_gather(self._packed[self._unsent.popleft()]))
        self._take_in(waits=False)

    def _take_in(self, waits: bool) -> None:
        # A chunk passes two queues: on the way from the other ranks, then landed on the device
        # while its facts, from which the host learns how many rows take part, are on their way to
        # the CPU. The network waits for neither.
        while self._on_the_way and (waits or self._on_the_way[0].is_here()):
            rows = self._on_the_way.popleft().rows()
            width = self._facts.shape[1] * self._facts.element_size() // rows.element_size()
            facts = rows[:, :width].contiguous().view(torch.int64)
            self._landed.append((rows[:, width:], ToHost(facts)))
        while self._landed and (waits or self._landed[0][1].is_here()):
            rows, to_host = self._landed.popleft()
            # Ranks with a row less than others have padded the last chunk, behind the last slot.
            self._receive(rows, to_host.tensor()[: self.slots - self.arrived])

    def _receive(self, rows: DescriptorRows, facts: Int64[Tensor, "m facts"]) -> None:
        # The batch is in the order of slots, which is the same whatever the number of ranks.
        slots = self._slot_at[self.arrived : self.arrived + len(facts)]
        self._facts[slots] = facts
        self._gallery[queued(slots, rows.device)] = rows[: len(facts)]
        self.arrived += len(facts)
        if self.counter is not None:
            taking_part = facts[:, TAKES_PART].nonzero().flatten()
            self._uncounted.append(rows[queued(taking_part, rows.device)])
        # Tiles of few rows are slow, so chunks are counted together. How many depends on the slots
        # alone, not on when a chunk arrives: a run that is repeated sums in the same order, to the
        # same bits.
        is_last = self.arrived == self.slots
        if is_last or self.arrived - self._counted >= LEAST_COUNTED * self.world.size:
            self._count()

    def _count(self) -> None:
        if self.counter is not None:
            places = torch.arange(self._counted, self.arrived)
            places = places[self._facts[self._slot_at[places], TAKES_PART].bool()]
            labels = self._facts[self._slot_at[places], FINEST_LABEL]
            is_own = places % self.world.size == self.world.rank
            descriptors = torch.cat(self._uncounted)
            self._uncounted = []
            with full_precision(descriptors.device):
                self.counter.add(descriptors, labels, is_own)
        self._counted = self.arrived

    @torch.no_grad()
    def finish(self) -> Gathered:
        """Wait for pending messages and return the batch.

        Raises:
            ValueError: rows are missing or too many.
        """
        if self._filled != self._own_rows or self._packed is None:
            raise ValueError(
                f"rank {self.world.rank} added {self._filled} of its {self._own_rows} rows"
            )
        self._take_in(waits=True)
        # The packed rows go now: this object lives until the end of the replay.
        self._packed = None
        taking_part = self._facts[:, TAKES_PART].bool()
        facts = self._facts[taking_part]
        # The row of each slot, if its image takes part: rows have no gaps.
        row_of = taking_part.cumsum(0) - 1
        own_slots = self._slot_at[self.world.rank :: self.world.size]
        own_rows = row_of[own_slots[taking_part[own_slots]]]
        device = self._gallery.device
        gallery = self._gallery
        if len(facts) < self.slots:
            gallery = gallery[queued(taking_part, device)]
        arrival = None
        if self.order is not None:
            arrival = queued(row_of[self.order[taking_part[self.order]]], device)
        return Gathered(
            gallery=gallery,
            gallery_levels=queued(facts[:, FINEST_LABEL:].contiguous(), device),
            samples=queued(facts[:, SAMPLE].contiguous(), device),
            own=queued(own_rows, device),
            taking_part=queued(taking_part, device),
            world=self.world,
            order=None if self.order is None else queued(self.order, device),
            arrival=arrival,
        )


def gather(
    descriptors: Float[Tensor, "b C"],
    labels: Int64[Tensor, " b"] | Int64[Tensor, "b L"],
    taking_part: Bool[Tensor, " b"],
    world: World,
    slots: int,
    samples: Int64[Tensor, " b"] | None = None,
) -> Gathered:
    """Gather the descriptors and labels of all ranks in slot order at once; see `Gathering`."""
    gathering = Gathering(world, slots)
    unknown = torch.full_like(taking_part, -1, dtype=torch.int64)
    gathering.add(descriptors, labels, taking_part, unknown if samples is None else samples)
    return gathering.finish()
