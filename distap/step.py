"""The three-stage training step (Revaud et al. 2019, section 3.2).

A batch of thousands of high-resolution images fits no memory with its activations, but its descriptors do. So
every image is described without a graph, all descriptors are ranked at once, which gives the gradient of each,
and then every image is described again, a micro-batch at a time, and its gradient sent back.

Two things make the result the gradient of the whole batch and no approximation:
- an image's descriptor depends on the image and the random state alone, and both are the same in stage one and
  stage three. What this rests on (frozen BatchNorm, restored randomness) is watched as the replay drift;
- `engine.accumulating` encloses what leads to the gradients, so that ranks communicate once a step.

Where there is memory for it, the last micro-batches of stage one keep their graph, and need no second forward.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from distap.engine import Engine
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.ranking import CrossBatchMemory, Gathered, Gathering, Loss, Mode, Ranking
from distap.stages.batch import Batch
from distap.stages.device_copies import DeviceCopies
from distap.stages.micro_batches import (
    BackwardPass,
    Rows,
    backward_passes,
    first_of,
    is_out_of_memory,
    padding,
    with_last,
)
from distap.stages.replay_drift import drift_message, mixes_images
from distap.stopwatch import Stopwatch
from distap.world import World

DROPOUT = 1  # first word of the key that dropout's randomness is drawn with
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class StepResult:
    """What a step did. Losses and counts are of the global batch, seconds of this rank."""

    loss: float
    learning_rate: float
    gradient_norm: float
    replay_drift: float  # greatest difference between the two descriptors of an image, over all ranks
    replayed: int  # images with a gradient that were described again for it
    kept: int  # images with a gradient whose graph was kept instead
    queries: int
    skipped_queries: int  # images without another of their class
    skipped: str | None = None  # why the parameters did not move: 'loss' or 'gradient' was not finite
    not_finite: list[int] = field(default_factory=list)  # rows of this rank whose descriptor was not finite


@runtime_checkable
class Describer(Protocol):
    """What describes the images of stage one in a cheaper way than the engine."""

    def refresh(self) -> None:
        """Take over the network's present parameters."""
        ...

    def __call__(self, images: Tensor, /) -> Tensor:
        """Descriptors (n, C) of a micro-batch, without a graph."""
        ...


@dataclass(frozen=True)
class Described:
    """This rank's descriptors, and those of them that have a graph."""

    descriptors: Float[Tensor, "b C"]  # without a graph
    kept: dict[int, Tensor]  # by its first row, the descriptors of a micro-batch of replay, with their graph
    gathering: Gathering  # on their way to the other ranks


@dataclass
class ThreeStageStep:
    """Describe, rank, replay.

    Sizes that are too large for the memory are halved where that happens, and stay so.

    Args:
        engine: the network over the ranks, and its optimiser.
        loss: the listwise loss over the global batch.
        world: the ranks.
        seed: of the training; with the step and the slot it determines dropout.
        replay_size: images in a micro-batch of stage three.
        describe_size: images in a micro-batch of stage one; None takes that of stage three.
        mode: `sharded` ranks on all ranks, `central` on rank 0.
        ranking_memory: bytes that ranking may use beside the descriptors; None chooses by the device.
        memory: descriptors of earlier steps, ranked against from step `memory_after` on.
        max_drift: greatest tolerated difference between the two descriptors of an image.
        stopwatch: gathers the seconds of each stage.
        keep: micro-batches of this rank that keep their graph from stage one.
        skip_below: an image whose descriptor gradient is no longer than this times the longest is not replayed; 0
            leaves out those without any.
        describer: describes the images of stage one instead of the engine, such as with folded BatchNorm.
        overlap: gather and count descriptors while the network goes on describing.
    Raises:
        DistapError: the network or the engine does not allow these sizes.
    """

    engine: Engine
    loss: Loss
    world: World
    seed: int
    replay_size: int
    describe_size: int | None = None
    mode: Mode = "sharded"
    ranking_memory: int | None = None
    memory: CrossBatchMemory = field(default_factory=lambda: CrossBatchMemory(0))
    memory_after: int = 0
    max_drift: float = 1e-3
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    keep: int = 0
    skip_below: float = 0.0
    describer: Describer | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        self._mixing = mixes_images(self.engine.network)
        if self._mixing and self.describe_size not in (None, self.replay_size):
            raise DistapError(
                f"describe and replay need the same micro-batch with this network, not {self.describe_size} and "
                f"{self.replay_size}: {self._mixing}"
            )
        if self.keep and not self.engine.keeps_graphs:
            raise DistapError(
                f"replay.keep is {self.keep}, but this engine can have the graph of one micro-batch only, since its "
                "parameters come and go with each; set it to 0"
            )
        self._to_device = DeviceCopies(self.world.device)
        self._reduce_seconds = self.engine.reduce_seconds  # that have been counted
        self._reducing = False  # in a backward pass that other ranks take part in

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Train on one global batch: every rank calls it with its own share.

        Raises:
            DistapError: on all ranks, where no image has a positive or the replay drift is too large; on one, where
                memory does not suffice.
        """
        described = self.describe(batch)
        gathered, not_finite = self.gather(described, batch)
        ranking = self.rank(described.gathering, gathered, batch.step)
        drift = norm = float("nan")
        replayed = kept = 0
        if ranking.is_finite:
            drift, replayed, kept = self.replay(batch, described, ranking)
            self.world.note(f"optimizer of step {batch.step + 1}")
            norm = self.update(learning_rate)
        return StepResult(
            float(ranking.loss),
            learning_rate,
            norm,
            drift,
            replayed,
            kept,
            ranking.queries,
            ranking.skipped_queries,
            None if norm < float("inf") else "gradient" if ranking.is_finite else "loss",
            not_finite,
        )

    def describe(self, batch: Batch) -> Described:
        """Stage one: the descriptors of this rank's images; their pixels stay with the batch, some with a graph."""
        self.world.note(f"describe of step {batch.step + 1}")
        b = len(self.world.slots(batch.total))
        # The last ones keep their graph, so that it lives no longer than it must.
        first_kept = max(-(-b // self.replay_size) - self.keep, 0) * self.replay_size if self.keep else b
        gathering = Gathering(self.world, batch.total, self.loss, self.mode, self.ranking_memory)
        parts: list[Tensor] = []
        kept: dict[int, Tensor] = {}
        start = 0
        with self.stopwatch.stage("describe"), self.engine.describing(), self._own_randomness():
            self._count_reducing()  # of an engine that gathers parameters first
            if self.describer is not None:
                self.describer.refresh()
            while start < b:
                keeps = start >= first_kept
                size = self.replay_size if keeps else self.describe_size or self.replay_size
                rows = slice(start, min(start + size, b if keeps else first_kept))
                try:
                    parts.append(self._described(batch, rows, kept if keeps else None))
                except RuntimeError as error:
                    self._make_room("describe", size, keeps, error)
                    if keeps:
                        kept, first_kept = {}, b
                    continue
                start = rows.stop
                if self.overlap:
                    _add(gathering, batch, rows, parts[-1])
        return Described(torch.cat(parts), kept, gathering)

    def gather(self, described: Described, batch: Batch) -> tuple[Gathered, list[int]]:
        """The descriptors and labels of all ranks; and which of this rank's rows are not finite.

        One descriptor that is not a number would poison every query of every rank, so its row is left out.
        """
        self.world.note(f"gather of step {batch.step + 1}")
        with self.stopwatch.stage("gather"):
            if not self.overlap:
                _add(described.gathering, batch, slice(0, len(described.descriptors)), described.descriptors)
            lost = (~described.descriptors.isfinite().all(dim=1)).nonzero().flatten()
            if len(lost):
                batch.blank(lost)
            for row in lost.tolist():
                # A gradient of zero does not stop what is not a number: its graph is not to be gone through.
                described.kept.pop(row // self.replay_size * self.replay_size, None)
            return described.gathering.finish(), lost.tolist()

    def rank(self, gathering: Gathering, gathered: Gathered, step: int) -> Ranking:
        """Stage two: the loss of the global batch and the gradient of this rank's descriptors."""
        self.world.note(f"rank of step {step + 1}")
        with self.stopwatch.stage("rank"):
            remembers = step >= self.memory_after
            ranking = gathering.rank(self.memory.extend(gathered) if remembers else gathered)
            if remembers and ranking.is_finite:
                self.memory.remember(gathered)
            return ranking

    def replay(self, batch: Batch, described: Described, ranking: Ranking) -> tuple[float, int, int]:
        """Stage three: describe again with a graph where none was kept, and send each descriptor's gradient back.

        Returns:
            The drift, and the numbers of images that were described again and that had kept their graph.
        """
        self.world.note(f"replay of step {batch.step + 1}")
        limit = 0.0
        if self.skip_below:
            limit = self.skip_below * self.world.maximum(float(ranking.gradient.norm(dim=1).max()))
        with self.stopwatch.stage("replay"), self._own_randomness():
            while True:
                passes = self._backward_passes(described, ranking, limit)
                try:
                    drift, counts = self._send_back(batch, described.descriptors, passes)
                    break
                except RuntimeError as error:
                    self._make_room("replay", self.replay_size, False, error)
                self.engine.discard()
                described.kept.clear()
        worst = self.world.maximum(float(drift))
        if worst > self.max_drift:
            self.engine.discard()
            raise DistapError(drift_message(worst, self.max_drift, batch.step + 1))
        replayed, kept = self.world.sum(counts).tolist()
        return worst, replayed, kept

    def update(self, learning_rate: float) -> float:
        """Move the parameters along the gradient of the global loss; returns its norm."""
        with self.stopwatch.stage("optimizer"):
            return self.engine.update(learning_rate)

    def _backward_passes(self, described: Described, ranking: Ranking, limit: float) -> Iterable[BackwardPass]:
        """Those of this rank: at least one, and as many as the others' where all take part in each."""
        b, nothing = len(described.descriptors), padding(described.descriptors)
        passes = backward_passes(
            b, self.replay_size, ranking.gradient_of, described.kept, limit, regroup=self._mixing is None
        )
        if self.engine.lockstep:
            mine = list(passes)
            longest = int(self.world.maximum(max(len(mine), 1)))
            return mine + [nothing] * (longest - len(mine))
        return chain([next(passes, nothing)], passes)

    def _send_back(
        self, batch: Batch, descriptors: Float[Tensor, "b C"], passes: Iterable[BackwardPass]
    ) -> tuple[Tensor, Tensor]:
        """This rank's drift, and its numbers of images that were described again and that had kept their graph."""
        drift = torch.zeros((), dtype=torch.float64, device=descriptors.device)
        counts = torch.zeros(2, dtype=torch.int64, device=descriptors.device)
        for one, is_last in with_last(passes):
            with self.engine.accumulating(is_last):
                again = one.kept
                if again is None:
                    again = self._network_forward(batch, one.rows, self.engine.forward)
                    if not one.is_padding:
                        drift = torch.maximum(drift, _difference(again.detach(), descriptors[one.rows]))
                counts[int(one.kept is not None)] += one.gradient.any(dim=1).sum()
                self._reducing = is_last and self.world.size > 1
                with self.stopwatch.stage("network", part_of_outer=True):
                    self.engine.backward(again, one.gradient)
                    self._count_reducing()
            self._count_reducing()  # of an engine that reduces behind the backward pass
            self._reducing = False
        return drift, counts

    def _count_reducing(self) -> None:
        """Count what the engine has waited for other ranks since the last time."""
        self.stopwatch.move("reduce", self.engine.reduce_seconds - self._reduce_seconds)
        self._reduce_seconds = self.engine.reduce_seconds

    def _described(self, batch: Batch, rows: slice, kept: dict[int, Tensor] | None) -> Float[Tensor, "n C"]:
        """Descriptors of a micro-batch, without a graph; those with one go to `kept`, where there is one."""
        if kept is None:
            with torch.no_grad():
                return self._network_forward(batch, rows, self.describer or self.engine.describe)
        # A copy, since the graph may need the pixels long after others have taken their place.
        kept[rows.start] = self._network_forward(batch, rows, lambda images: self.engine.forward(images.clone()))
        return kept[rows.start].detach()

    def _network_forward(self, batch: Batch, rows: Rows, forward: Callable[[Tensor], Tensor]) -> Float[Tensor, "n C"]:
        """Descriptors of a micro-batch, its dropout drawn from (seed, step, slot), so the same every time."""
        images = self._to_device(batch.images(rows))
        slot = self.world.slots(batch.total)[first_of(rows)]
        with self.stopwatch.stage("network", part_of_outer=True):
            torch.manual_seed(seed_for(DROPOUT, self.seed, batch.step, slot))
            return forward(images)

    def _make_room(self, stage: str, size: int, keeps: bool, error: RuntimeError) -> None:
        """Halve what a stage holds in memory at once, where that was too much and the step can still go on.

        Raises:
            RuntimeError: the error was another one.
            DistapError: the step cannot go on.
        """
        if not is_out_of_memory(error):
            raise error
        if keeps:
            self.keep //= 2
            logger.warning("out of memory while graphs are kept: %d micro-batches keep theirs now", self.keep)
            return
        if size == 1:
            raise DistapError(
                f"out of memory in {stage} with micro-batches of one image; take smaller images (data.image_size), a "
                "smaller backbone, or step.activation_checkpointing"
            ) from error
        reason = self._mixing
        if stage == "replay" and (self.engine.lockstep or self._reducing):
            reason = "the other ranks have begun to communicate"
        if reason:
            raise DistapError(
                f"out of memory in {stage} with micro-batches of {size} images, and they cannot be halved now: "
                f"{reason}; set {stage}.size to less, or take smaller images (data.image_size)"
            ) from error
        half = size // 2
        logger.warning("out of memory in %s: micro-batches of %d images from now on, not of %d", stage, half, size)
        if stage == "describe":
            self.describe_size = half
        else:
            self.describe_size = self.describe_size or size
            self.replay_size = half

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Leave torch's global random state as it was found."""
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield


def _add(gathering: Gathering, batch: Batch, rows: slice, descriptors: Float[Tensor, "n C"]) -> None:
    """Send a micro-batch's descriptors on their way; those that are not finite, or of no image, take no part."""
    device = descriptors.device
    images = torch.tensor(batch.samples[rows], dtype=torch.int64, device=device)
    gathering.add(descriptors, batch.labels[rows].to(device), batch.present[rows].to(device), images)


def _difference(again: Float[Tensor, "n C"], before: Float[Tensor, "n C"]) -> Float[Tensor, ""]:
    """The greatest between two descriptors of an image; one that was not finite has been blanked since."""
    difference = (again - before).abs().amax(dim=1)
    return torch.where(before.isfinite().all(dim=1), difference, 0).max().double()
