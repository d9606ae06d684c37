"""The batch, gathered from all ranks and counted while the network goes on describing."""

from collections import deque

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered
from distap.ranking.histogram.passes import Passes
from distap.ranking.histogram.tiles import strips
from distap.ranking.losses.quantized import SoftBinnedAP
from distap.ranking.precision import full_precision
from distap.ranking.protocol import Loss, Mode, Ranking
from distap.ranking.rank import rank_counted, rank_descriptors
from distap.world import Arrival, World

MOST_CHUNKS = 8
LEAST_SENT = 64  # rows of a rank in a chunk
LEAST_COUNTED = 1024  # rows of a rank that are counted at once: fewer make small tiles, 10% slower at 512
FACTS_BYTES = 3 * 8  # label, number of the image, whether it takes part: int64 each


class Gathering:
    """Collects a batch chunk by chunk: `add` rows as they are described, `finish`, `rank`.

    Every rank adds its own rows, in their order, as many or few at a time as it likes. A chunk is sent when this rank
    has all its rows of it, in one collective; nothing waits before `finish`. Losses that see histograms only (AP_Q,
    AP_T, FastAP) count pairs once some chunks have arrived, and make their gradient when it is asked for; all others
    rank at the end.

    Args:
        world: the ranks; each holds the slots rank, rank + W, ...
        slots: number of rows of all ranks together.
        loss, mode, memory_budget: as those of `rank_descriptors`.
        least_counted: rows of a rank that are counted at once, unless the batch is smaller; the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        slots: int,
        loss: Loss,
        mode: Mode = "sharded",
        memory_budget: int | None = None,
        least_counted: int = LEAST_COUNTED,
    ) -> None:
        self.world, self.slots, self.loss = world, slots, loss
        self.mode, self.memory_budget = mode, memory_budget
        self.own_rows = len(world.slots(slots))
        share = -(-slots // world.size)
        self._least_counted = least_counted * world.size
        self._chunks = list(strips(0, share, max(min(LEAST_SENT, least_counted), -(-share // MOST_CHUNKS))))
        self._filled = self._started = 0  # rows that were added, chunks that were sent
        self._packed: Tensor | None = None  # this rank's rows: the facts' bits, then the descriptor
        self._on_the_way: deque[Arrival] = deque()
        self._gallery: Tensor | None = None  # what has arrived and takes part; room for all behind it
        self._facts: list[Int64[Tensor, "n facts"]] = []  # of all slots that have arrived
        self._seen = 0  # rows of the gallery
        self._uncounted: list[tuple[Tensor, Tensor]] = []  # labels of its last rows, and which are this rank's
        self._waiting = 0  # slots that these came from
        self._passes: Passes | None = None

    @torch.no_grad()
    def add(
        self,
        descriptors: Float[Tensor, "n C"],
        labels: Int64[Tensor, " n"],
        taking_part: Bool[Tensor, " n"],
        images: Int64[Tensor, " n"] | None = None,
    ) -> None:
        """Take this rank's next rows; one that takes no part, or is not finite, is left out of the batch.

        Args:
            descriptors, labels, taking_part, images: of these rows, as those of `gather`.
        Raises:
            ValueError: these are more rows than the rank has.
            CollectiveError: a rank or the network failed.
        """
        filled = self._filled + len(descriptors)
        if filled > self.own_rows:
            raise ValueError(f"row {filled - 1} of rank {self.world.rank} was added, which has {self.own_rows} rows")
        dimensions, width = descriptors.shape[1], FACTS_BYTES // descriptors.element_size()
        if self._packed is None:
            self._packed = descriptors.new_zeros(self._chunks[-1].stop, width + dimensions)
            self._gallery = descriptors.new_empty(self.slots, dimensions)
        known = torch.full_like(labels, -1) if images is None else images
        # NaN and infinity times 0 are NaN, and a sum is ten times as fast as looking at each value.
        takes_part = taking_part & ((descriptors * 0).sum(dim=1) == 0)
        facts = torch.stack([labels, known, takes_part.long()], dim=1).contiguous()
        self._packed[self._filled : filled, :width] = facts.view(descriptors.dtype)
        self._packed[self._filled : filled, width:] = descriptors
        self._filled = filled
        self._send()
        while self._on_the_way and self._on_the_way[0].is_here():
            self._receive()

    @property
    def arrived(self) -> int:
        """Slots of the batch that were taken in so far."""
        return sum(map(len, self._facts))

    def _send(self) -> None:
        """Start what is complete; shorter shares have padding in their last row, which takes no part."""
        assert self._packed is not None
        while self._started < len(self._chunks):
            rows = self._chunks[self._started]
            if min(rows.stop, self.own_rows) > self._filled:
                return
            self._on_the_way.append(self.world.start_gather(self._packed[rows]))
            self._started += 1

    def _receive(self) -> None:
        """Take in the chunk that was sent first; waits for it where it is not here."""
        arrived = self._on_the_way.popleft().rows()
        assert self._gallery is not None
        first_slot = self.arrived
        arrived = arrived[: self.slots - first_slot]
        width = FACTS_BYTES // arrived.element_size()
        facts = arrived[:, :width].contiguous().view(torch.int64)
        takes_part = facts[:, 2].bool()
        slots = first_slot + torch.arange(len(facts), device=facts.device)[takes_part]
        seen = self._seen + len(slots)
        self._gallery[self._seen : seen] = arrived[takes_part, width:]
        self._seen = seen
        self._facts.append(facts)
        self._uncounted.append((facts[takes_part, 0], self._is_own(slots)))
        self._waiting += len(facts)
        is_last = first_slot + len(facts) == self.slots
        if is_last or self._waiting >= self._least_counted:
            self._count(self._gallery[: self._seen])
            self._uncounted, self._waiting = [], 0

    def _count(self, gallery: Float[Tensor, "n C"]) -> None:
        """Count the pairs of what has arrived since the last time."""
        if not isinstance(self.loss, SoftBinnedAP) or (self.mode == "central" and self.world.size > 1):
            return
        if self._passes is None:
            budget = Budget.of(gallery.device, self.memory_budget)
            self._passes = self.loss.passes(self.own_rows, self.slots, gallery, budget)
        labels, is_own = map(torch.cat, zip(*self._uncounted, strict=True))
        with full_precision(gallery.device):
            self._passes.add(gallery[self._passes.seen :], labels, is_own)

    def _is_own(self, slots: Int64[Tensor, " n"]) -> Bool[Tensor, " n"]:
        return slots % self.world.size == self.world.rank

    @torch.no_grad()
    def finish(self) -> Gathered:
        """What `gather` gives for all rows at once; waits for what is on its way.

        Raises:
            ValueError: rows are missing.
            CollectiveError: a rank or the network failed.
        """
        if self._filled < self.own_rows or self._gallery is None:
            raise ValueError(f"rank {self.world.rank} added {self._filled} of its {self.own_rows} rows")
        while self._on_the_way:
            self._receive()
        self._packed = None
        facts = torch.cat(self._facts)
        taking_part = facts[:, 2].bool()
        is_own = self._is_own(taking_part.nonzero().flatten())
        return Gathered(
            self._gallery[: self._seen],
            facts[taking_part, 0],
            facts[taking_part, 1],
            is_own.nonzero().flatten(),
            taking_part,
            self.world,
        )

    def rank(self, gathered: Gathered) -> Ranking:
        """As `rank_descriptors`, from what was counted before; the gradient's rows are made when they are asked for.

        Args:
            gathered: what `finish` gave; a cross-batch memory may have extended it.
        Raises:
            DistapError: nothing can be ranked; raised on every rank.
        """
        passes, self._passes = self._passes, None
        if passes is None or not isinstance(self.loss, SoftBinnedAP):
            return rank_descriptors(self.loss, gathered, self.mode, self.memory_budget)
        return rank_counted(self.loss, passes, gathered)
