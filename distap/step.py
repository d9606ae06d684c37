"""The three-stage training step (Revaud et al. 2019, section 3.2).

A batch of thousands of high-resolution images fits no memory with its activations, but its descriptors do. So
every image is described without a graph, all descriptors are ranked at once, which gives the gradient of each,
and then every image is described again, a micro-batch at a time, and its gradient sent back.

Two things make the result the gradient of the whole batch and no approximation:
- an image's descriptor depends on the image and the random state alone, and both are the same in stage one and
  stage three. What this rests on (frozen BatchNorm, restored randomness) is watched as the replay drift;
- `engine.accumulating` encloses forward and backward, so that ranks communicate once a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from distap.distributed import World
from distap.engine import Engine
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.ranking import CrossBatchMemory, Gathered, Loss, Mode, Ranking, gather, rank_descriptors
from distap.stopwatch import Stopwatch

DROPOUT = 1  # first word of the key that dropout's randomness is drawn with


@runtime_checkable
class Batch(Protocol):
    """This rank's share of a global batch: the slots rank, rank + W, ... of `total`."""

    step: int
    total: int

    @property
    def labels(self) -> Int64[Tensor, " b"]:
        """Classes of the images, known once every image has been asked for."""
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Numbers of the images in the data set, known once every image has been asked for."""
        ...

    @property
    def present(self) -> Bool[Tensor, " b"]:
        """False for an image that could not be read."""
        ...

    def images(self, rows: slice) -> Tensor:
        """Pixels of some of the share's images, (n, ...); waits for those that have not been read yet."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Forget the pixels of these images: the network cannot describe them."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step did. Losses and counts are of the global batch, seconds of this rank."""

    loss: float
    learning_rate: float
    gradient_norm: float
    replay_drift: float  # greatest difference between the two descriptors of an image, over all ranks
    queries: int
    skipped_queries: int  # images without another of their class
    skipped: str | None = None  # why the parameters did not move: 'loss' or 'gradient' was not finite
    not_finite: list[int] = field(default_factory=list)  # rows of this rank whose descriptor was not finite


@dataclass(frozen=True)
class MicroBatch:
    """Some images of a rank's share. A padding one only keeps a rank with fewer images in step with the rest."""

    rows: slice
    first_slot: int
    padding: bool = False


@dataclass(frozen=True)
class ThreeStageStep:
    """Describe, rank, replay.

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

    def __post_init__(self) -> None:
        reason = mixes_images(self.engine.network)
        if reason and self.describe_size not in (None, self.replay_size):
            raise DistapError(
                f"describe and replay need the same micro-batch with this network, not {self.describe_size} and "
                f"{self.replay_size}: {reason}"
            )

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Train on one global batch: every rank calls it with its own share.

        Raises:
            DistapError: on all ranks, where no image has a positive or the replay drift is too large.
        """
        descriptors = self.describe(batch)
        gathered, not_finite = self.gather(descriptors, batch)
        ranking = self.rank(gathered, batch.step)
        drift = norm = float("nan")
        if ranking.is_finite:
            drift = self.replay(batch, descriptors, ranking.gradient)
            self.world.note(f"optimizer of step {batch.step + 1}")
            norm = self.update(learning_rate)
        return StepResult(
            float(ranking.loss),
            learning_rate,
            norm,
            drift,
            ranking.queries,
            ranking.skipped_queries,
            None if norm < float("inf") else "gradient" if ranking.is_finite else "loss",
            not_finite,
        )

    def describe(self, batch: Batch) -> Float[Tensor, "b C"]:
        """Stage one: the descriptors of this rank's images, without a graph; the pixels stay with the batch."""
        self.world.note(f"describe of step {batch.step + 1}")
        micro_batches = self.micro_batches(batch, self.describe_size or self.replay_size)
        with self.stopwatch.stage("describe"), torch.no_grad(), self._own_randomness():
            return torch.cat(
                [
                    self._network_forward(batch, micro_batch, self.engine.network)
                    for micro_batch in micro_batches
                    if not micro_batch.padding
                ]
            )

    def gather(self, descriptors: Float[Tensor, "b C"], batch: Batch) -> tuple[Gathered, list[int]]:
        """The descriptors and labels of all ranks; and which of this rank's rows are not finite.

        One descriptor that is not a number would poison every query of every rank, so its row is left out.
        """
        self.world.note(f"gather of step {batch.step + 1}")
        with self.stopwatch.stage("gather"):
            finite = descriptors.isfinite().all(dim=1)
            lost = (~finite).nonzero().flatten()
            batch.blank(lost)
            taking_part = finite & batch.present.to(finite.device)
            labels = batch.labels.to(finite.device)
            images = torch.tensor(batch.samples, dtype=torch.int64, device=finite.device)
            return gather(descriptors, labels, taking_part, self.world, batch.total, images), lost.tolist()

    def rank(self, gathered: Gathered, step: int) -> Ranking:
        """Stage two: the loss of the global batch and the gradient of this rank's descriptors."""
        self.world.note(f"rank of step {step + 1}")
        with self.stopwatch.stage("rank"):
            remembers = step >= self.memory_after
            ranked = self.memory.extend(gathered) if remembers else gathered
            ranking = rank_descriptors(self.loss, ranked, self.mode, self.ranking_memory)
            if remembers and ranking.is_finite:
                self.memory.remember(gathered)
            return ranking

    def replay(self, batch: Batch, descriptors: Float[Tensor, "b C"], gradient: Float[Tensor, "b C"]) -> float:
        """Stage three: describe again with a graph, send each descriptor's gradient back; returns the drift."""
        self.world.note(f"replay of step {batch.step + 1}")
        micro_batches = self.micro_batches(batch, self.replay_size)
        drift = torch.zeros((), dtype=torch.float64, device=descriptors.device)
        reduced = self.engine.reduce_seconds
        with self.stopwatch.stage("replay"), self._own_randomness():
            for micro_batch in micro_batches:
                rows, is_last = micro_batch.rows, micro_batch is micro_batches[-1]
                with self.engine.accumulating(is_last):
                    again = self._network_forward(batch, micro_batch, self.engine.forward)
                    with self.stopwatch.stage("network", part_of_outer=True):
                        self.engine.backward(again, gradient[rows] * (not micro_batch.padding))
                        self.stopwatch.move("reduce", self.engine.reduce_seconds - reduced)
                        reduced = self.engine.reduce_seconds
                if not micro_batch.padding:
                    difference = (again.detach() - descriptors[rows]).abs().amax(dim=1)
                    # A row whose descriptor was not finite has been blanked since.
                    difference = torch.where(descriptors[rows].isfinite().all(1), difference, 0)
                    drift = torch.maximum(drift, difference.max())
        worst = self.world.maximum(float(drift))
        if worst > self.max_drift:
            self.engine.discard()
            raise DistapError(_drift_message(worst, self.max_drift, batch.step + 1))
        return worst

    def update(self, learning_rate: float) -> float:
        """Move the parameters along the gradient of the global loss; returns its norm."""
        with self.stopwatch.stage("optimizer"):
            return self.engine.update(learning_rate)

    def micro_batches(self, batch: Batch, size: int) -> list[MicroBatch]:
        """This rank's share cut in micro-batches; every rank gets the same number of them.

        A rank whose share is too short for that repeats its first image, with a gradient of zero.
        """
        slots = self.world.slots(batch.total)
        longest = len(range(0, batch.total, self.world.size))
        cuts = range(0, longest, size)
        return [
            MicroBatch(slice(start, min(start + size, len(slots))), slots[start])
            if start < len(slots)
            else MicroBatch(slice(0, 1), slots[0], padding=True)
            for start in cuts
        ]

    def _network_forward(self, batch: Batch, micro_batch: MicroBatch, network: "Forward") -> Tensor:
        """Descriptors of a micro-batch, its dropout drawn from (seed, step, slot), so the same every time."""
        images = batch.images(micro_batch.rows).to(self.world.device, non_blocking=True)
        with self.stopwatch.stage("network", part_of_outer=True):
            torch.manual_seed(seed_for(DROPOUT, self.seed, batch.step, micro_batch.first_slot))
            descriptors = network(images)
        return descriptors

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Leave torch's global random state as it was found."""
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield


@runtime_checkable
class Forward(Protocol):
    """A network, or an engine's forward."""

    def __call__(self, images: Tensor, /) -> Tensor: ...  # noqa: D102


def mixes_images(network: nn.Module) -> str | None:
    """Why an image's descriptor depends on its micro-batch in this network, or None where it does not."""
    for name, module in network.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise DistapError(f"{name} is a SyncBatchNorm, whose gradient over ranks a replay cannot reproduce")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} normalises by the statistics of its micro-batch"
        probability = getattr(module, "drop_prob", getattr(module, "p", 0))
        if "drop" in type(module).__name__.lower() and isinstance(probability, float) and probability > 0:
            return f"{name} drops at random, drawing for the whole micro-batch"
    return None


def _drift_message(drift: float, limit: float, step: int) -> str:
    return (
        f"step {step}: replay drift {drift:.2g} exceeds {limit:g}: describe and replay gave different descriptors "
        "for the same image, so the gradient would be wrong. Usual causes: randomness that torch's generators do "
        "not control, BatchNorm whose statistics change within the step, a layer that mixes the images of a "
        "micro-batch, or a precision too low for the limit (step.max_replay_drift)"
    )
