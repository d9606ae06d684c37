"""The three-stage training step (Revaud et al. 2019, section 3.2).

A batch of thousands of high-resolution images does not fit in memory with its activations, but its
descriptors do:

    describe   for each micro-batch: d = network(images), without a graph;
               keep the pixels, d and the random state
    gather     descriptors and labels of all ranks
    rank       loss and the gradient of every descriptor, over the whole global batch
    replay     for each micro-batch: d = network(images) again, with a graph;
               d.backward(its gradient)
    update     one reduction over the ranks, one optimiser step

The result is the gradient of the whole batch, not an approximation: a descriptor depends on its
image and the random state alone, and both are the same in describe and replay. What this rests on
(frozen BatchNorm, restored randomness) is watched as the replay drift. The trainer and
`distap.Multistage` both run these stages; the replica says how ranks share the network, and lets
them reduce gradients once per step.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from distap.errors import DistapError, memory_ran_out
from distap.randomness import seed_for
from distap.ranking.device_copies import moved
from distap.ranking.gather import Gathering
from distap.ranking.gathered import Gathered
from distap.ranking.inputs import agreement
from distap.ranking.loss import Loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import Mode, Ranking, rank_descriptors, start_gathering
from distap.ranking.rankable import refuse_other_leaves, refuse_shared_graphs
from distap.stages.exactness import (
    SavedBuffers,
    drift,
    drift_error,
    normalises_by_batch,
    refuse_mixing,
    why_cut_matters,
    without_caches,
)
from distap.stages.micro_batches import BackwardPass, Batch, MicroBatchSizes, Rows, backward_passes
from distap.stages.replica import Replica
from distap.stopwatch import Stopwatch
from distap.world import World

OUTSIDE = "the network uses it, but it is none of network.parameters() (is it in a plain list?)"
IN_LOCKSTEP = "this engine cannot give up what it has begun"
PROBED = 3  # images that are described once more in the first step, in other cuts
DROPOUT = 1  # first word of the key that seeds dropout


@dataclass(frozen=True)
class Described:
    """The result of describe, stage one: this rank's descriptors."""

    descriptors: Float[Tensor, "b C"]  # without a graph
    graphs: dict[int, Tensor]  # descriptors with their graph, by their micro-batch's first row
    gathering: Gathering  # carries them to the other ranks
    buffers: SavedBuffers  # of the network, before this stage
    # rows whose descriptor is not finite, which `gather` fills in
    lost: list[int] = field(default_factory=list)


@dataclass
class ThreeStages:
    """The stages describe, gather, rank and replay.

    Raises:
        DistapError: the engine cannot keep graphs, or the loss no memory of earlier descriptors.
    """

    replica: Replica  # the network on this rank
    loss: Loss
    world: World
    seed: int  # with the step and the slot it determines dropout
    sizes: MicroBatchSizes  # of each stage; sizes that do not fit in memory are halved
    mode: Mode = "sharded"  # `sharded` ranks on all ranks, `central` on rank 0
    # for ranking, next to the descriptors; None chooses by the device
    memory_bytes: int | None = None
    # descriptors of earlier steps
    memory: CrossBatchMemory = field(default_factory=lambda: CrossBatchMemory(0))
    memory_after: int = 0  # the first step that is ranked against the memory
    max_drift: float = 1e-3  # greatest tolerated difference between the two descriptors of an image
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    # Skip the replay of images whose descriptor gradient is no longer than this times the longest.
    skip_below: float = 0.0
    probed: bool = False  # whether the network was seen to depend on image and random state alone

    def __post_init__(self) -> None:
        self._why_cut_matters = why_cut_matters(self.replica.network)
        keep = self.sizes.keep
        if keep and not self.replica.keeps_graphs:
            raise DistapError(
                "engine.keeps_no_graphs",
                f"replay.keep is {keep}, but this engine holds one graph at a time; set it to 0",
            )
        if self._why_cut_matters and self.sizes.describe != self.sizes.images:
            raise DistapError(
                "network.cut_matters",
                f"describe.size is {self.sizes.describe} and replay.size {self.sizes.images}, but"
                f" {self._why_cut_matters}, so both stages have to cut the batch alike: leave"
                " describe.size out",
            )
        self.memory.refuse_unfit(self.loss)
        self._cannot_restart = False  # while a backward pass runs that cannot be given up

    def describe(self, batch: Batch) -> Described:
        """Stage one: describe this rank's images. Some of them keep their graph."""
        share = len(self.world.slots(batch.total))
        start = 0
        first_kept = self.sizes.first_kept(share)
        gathering = start_gathering(
            self.loss, self.world, batch.total, self.mode, self.memory_bytes, batch.order
        )
        pieces = list[Tensor]()
        graphs = dict[int, Tensor]()

        def send(rows: slice, descriptors: Tensor) -> None:
            gathering.add(descriptors, batch.labels[rows], batch.present[rows], batch.samples[rows])

        with self.stage("describe", batch.step), self.replica.describing():
            if not self.probed:
                self._probe_on_all(batch)
            buffers = SavedBuffers(self.replica.network)
            # Not a loop over fixed cuts: a size that runs out of memory is halved, and the same
            # rows are tried again.
            while start < share:
                # Micro-batches that keep their graph are the last ones, so that graphs wait the
                # shortest for replay.
                keeps = start >= first_kept
                if keeps:
                    rows = slice(start, min(start + self.sizes.images, share))
                else:
                    rows = slice(start, min(start + self.sizes.describe, first_kept))
                try:
                    with torch.set_grad_enabled(keeps):
                        descriptors = self._forward(batch, rows, buffers, keeps)
                except RuntimeError as error:
                    obstacle = self._why_cut_matters
                    if self.replica.describes_in_lockstep:
                        obstacle = IN_LOCKSTEP
                    self.sizes.halve("describe", keeps, error, obstacle)
                    # Graphs that wait for the replay hold the memory that is missing. Their
                    # descriptors stay.
                    if keeps:
                        graphs = {}
                        first_kept = share
                    continue
                if keeps:
                    graphs[start] = descriptors
                pieces.append(descriptors.detach())
                start = rows.stop
                # The rows travel, and are counted, while the network goes on describing. In
                # lockstep, messages of rows would meet gathers of parameters in other orders.
                if not self.replica.describes_in_lockstep:
                    send(rows, pieces[-1])
            if self.replica.describes_in_lockstep:
                self._catch_up(batch, len(pieces), buffers)
                send(slice(0, share), torch.cat(pieces))
        return Described(torch.cat(pieces), graphs, gathering, buffers)

    def _catch_up(self, batch: Batch, made: int, buffers: SavedBuffers) -> None:
        """Make as many passes as rank 0, whose share is the greatest; they count for nothing."""
        passes = -(-len(range(0, batch.total, self.world.size)) // self.sizes.describe)
        statistics = SavedBuffers(self.replica.network)
        with torch.no_grad():
            for _ in range(passes - made):
                self._forward(batch, slice(0, 1), buffers)
        statistics.restore()

    def _probe_on_all(self, batch: Batch) -> None:
        """Probe the network on every rank; all of them refuse it if one does."""
        with agreement(self.world, DistapError) as view:
            try:
                self._probe(batch)
                view.value = True
            except RuntimeError as error:
                if self.replica.describes_in_lockstep or not memory_ran_out(error):
                    raise
                # The next step tries again, with the smaller micro-batches of this one's end.
        self.probed = all(view.values)

    def _probe(self, batch: Batch) -> None:
        """Describe a few images twice; refuse a network whose gradient would be silently wrong."""
        # As many on each rank.
        probed = min(self.sizes.images, PROBED, max(batch.total // self.world.size, 1))
        network = self.replica.network
        images = moved(batch.images(slice(0, probed)), self.world.device)
        buffers = SavedBuffers(network)

        def describe(count: int, seed: int) -> Tensor:
            self._draw_from(seed)
            buffers.restore()
            return self.replica.forward(
                tree_map_only(Tensor, lambda tensor: tensor[:count], images)
            )

        # A network that torch.compile has compiled would be compiled again for cuts of other sizes.
        eagerly = (
            torch.compiler.set_stance("force_eager")
            if "torch._dynamo" in sys.modules
            else nullcontext()
        )
        try:
            with eagerly:
                if torch.is_grad_enabled() and not self.replica.lockstep:
                    # Leaves of both passes: a pass may make some of its own.
                    passes = [describe(probed, 0), describe(probed, 0)]
                    refuse_other_leaves(passes, network.parameters(), OUTSIDE)
                    refuse_shared_graphs(passes)
                if probed > 1 and not normalises_by_batch(network):
                    agreed = self.world.all_agree if self.replica.describes_in_lockstep else bool
                    with torch.no_grad():
                        refuse_mixing(describe, network, probed, agreed)
        finally:
            buffers.restore()

    def gather(self, described: Described, batch: Batch) -> Gathered:
        """Collect descriptors, labels and further tensors of all ranks.

        One descriptor that is not finite would poison every query of every rank, so its row is left
        out, and listed in `described.lost`.
        """
        with self.stage("gather", batch.step):
            lost = (~described.descriptors.isfinite().all(dim=1)).nonzero().flatten()
            # NaN times a gradient of zero is NaN. So these images are blank when replay describes
            # their micro-batch again, and graphs that hold them are not used.
            if len(lost):
                batch.blank(lost)
                described.lost.extend(lost.tolist())
                for first, rows in [*described.graphs.items()]:
                    if any(first <= row < first + len(rows) for row in described.lost):
                        del described.graphs[first]
            return described.gathering.finish().with_extra(batch.extra)

    def rank(self, gathering: Gathering, gathered: Gathered, step: int) -> Ranking:
        """Stage two: compute the loss of the batch and the gradient of this rank's descriptors."""
        with self.stage("rank", step):
            remembers = self.memory.size > 0 and step >= self.memory_after
            gathered = replace(gathered, key=(self.seed, step))
            ranked = self.memory.extend(gathered) if remembers else gathered
            ranking = rank_descriptors(
                self.loss, ranked, self.mode, self.memory_bytes, gathering.counter
            )
            if remembers and ranking.is_finite:
                self.memory.remember(gathered)
            return ranking

    def replay(
        self, batch: Batch, described: Described, gradient: Float[Tensor, "b C"]
    ) -> tuple[float, int, int]:
        """Stage three: describe again with a graph, and backpropagate each descriptor's gradient.

        Parameters get the gradient of <descriptors, gradient>, so a factor on `gradient` scales all
        of them. Returns the drift, and how many images were described again and how many had kept
        their graph.
        """
        with self.stage("replay", batch.step), self.replica.replaying():
            # The statistics of BatchNorm are to move once per step: replay moves them again, so
            # they go back to those that describe has left.
            buffers = SavedBuffers(self.replica.network)
            worst, counts = self._replay_until_it_fits(batch, described, gradient)
            # Describe may have moved them by numbers that are not finite; for replay those images
            # are blank. So the statistics then move by what replay adds to those from before the
            # step.
            if not described.lost:
                buffers.restore()
            # At the end, so that a rank which starts its replay again has sent nothing that the
            # others would add.
            with self.stopwatch.stage("reduce"):
                self.replica.reduce()
        greatest = self.world.maximum(float(worst))
        if greatest > self.max_drift:
            self.replica.discard()
            raise drift_error(greatest, self.max_drift, batch.step + 1)
        replayed, with_graph = self.world.sum(counts).tolist()
        return greatest, replayed, with_graph

    def _replay_until_it_fits(
        self, batch: Batch, described: Described, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run all backward passes; where memory runs out, begin again with smaller ones."""
        limit = 0.0
        if self.skip_below:
            limit = self.skip_below * self.world.maximum(float(gradient.norm(dim=1).max()))
        while True:
            passes = backward_passes(
                gradient,
                described.graphs,
                self.sizes.images,
                limit=limit,
                regroup=self._why_cut_matters is None,
                lockstep=self.world if self.replica.lockstep else None,
            )
            try:
                return self._run_passes(batch, described, passes)
            except RuntimeError as error:
                obstacle = self._why_cut_matters
                if self.replica.lockstep or self._cannot_restart:
                    obstacle = IN_LOCKSTEP
                self.sizes.halve("replay", False, error, obstacle)
            # A smaller cut begins from nothing: all gradients so far are given up, and all kept
            # graphs, since a backward pass through one has freed what a second one would need.
            self.replica.discard()
            described.graphs.clear()

    def _run_passes(
        self, batch: Batch, described: Described, passes: list[BackwardPass]
    ) -> tuple[Tensor, Tensor]:
        """Run the backward passes: those of kept graphs, which come first, and the replayed ones.

        Returns this rank's drift, and its numbers of replayed images and of images whose graph was
        kept, (2,), without those of gradient zero. Both stay on the device: reading them here would
        wait for it.
        """
        worst = torch.zeros((), dtype=torch.float64, device=described.descriptors.device)
        counts = torch.zeros(2, dtype=torch.int64, device=described.descriptors.device)
        kept = sum(micro_batch.descriptors is not None for micro_batch in passes)
        for number, micro_batch in enumerate(passes):
            # Not before: kept graphs may need the buffers that describe has left.
            if number == kept:
                described.buffers.restore()
            descriptors = micro_batch.descriptors
            statistics = SavedBuffers(self.replica.network) if micro_batch.is_padding else None
            if descriptors is None:
                descriptors = self._forward(batch, micro_batch.rows, described.buffers)
                if not micro_batch.is_padding:
                    before = described.descriptors[micro_batch.rows]
                    worst = torch.maximum(worst, drift(descriptors.detach(), before))
            counts[int(number < kept)] += micro_batch.gradient.any(dim=1).sum()
            self._cannot_restart = not self.replica.survives_backward
            is_last = number == len(passes) - 1
            with self.stopwatch.stage("network", part_of_outer=True):
                self.replica.backward(descriptors, micro_batch.gradient, is_last)
            self._cannot_restart = False
            if statistics is not None:
                statistics.restore()
        return worst, counts

    def _forward(
        self, batch: Batch, rows: Rows, buffers: SavedBuffers, keeps: bool = False
    ) -> Float[Tensor, "n C"]:
        """Describe a micro-batch, with the buffers of before the step.

        (seed, step, slot) seeds dropout, so that describe and replay draw the same.
        """
        buffers.restore(statistics=False)
        images = moved(batch.images(rows), self.world.device)
        if keeps:  # the graph may need the pixels after the batch has overwritten their memory
            images = tree_map_only(Tensor, Tensor.clone, images)
        # The first image's slot stands for its micro-batch. Layers that draw for the whole
        # micro-batch draw alike in describe and replay, since the two cut alike where there are
        # such layers (`why_cut_matters`).
        first = int(rows.start if isinstance(rows, slice) else rows[0])
        slot = self.world.slots(batch.total)[first]
        if batch.order is not None:
            slot = int(batch.order[slot])
        with self.stopwatch.stage("network", part_of_outer=True):
            self._draw_from(seed_for(DROPOUT, self.seed, batch.step, slot))
            return self.replica.forward(images)

    def _draw_from(self, seed: int) -> None:
        # Not torch.manual_seed, which looks at the stack for each kind of device that is not in
        # use, 0.2 ms.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).manual_seed_all(seed)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time a stage, announce it to all watchdogs, and restore torch's random state."""
        self.world.note(f"{name} of step {step + 1}")
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with self.stopwatch.stage(name), torch.random.fork_rng(devices), without_caches():
            yield
