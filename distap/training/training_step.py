"""One step of a training: the three stages, then one update of the parameters."""

from dataclasses import dataclass, field

import torch

from distap.ranking.rank import NothingToRankError
from distap.stages.micro_batches import Batch
from distap.step import ThreeStages
from distap.training.learner import Learner

NAN = float("nan")


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step; loss and counts are of the global batch."""

    loss: float
    learning_rate: float
    gradient_norm: float
    replay_drift: float  # greatest difference between the two descriptors of an image, over all ranks
    replayed: int  # images with a gradient that were described a second time
    kept: int  # images with a gradient whose graph was kept instead
    queries: int
    skipped_queries: int  # images without another image of their class
    skipped: str | None = None  # why the parameters did not move: 'descriptor', 'loss' or 'gradient' was not finite
    not_finite: list[int] = field(default_factory=list)  # rows of this rank whose descriptor was not finite
    spread: float = NAN  # mean squared distance of the batch's descriptors to their mean; 0 if all are alike


@dataclass(frozen=True)
class TrainingStep:
    """A training step: describe, gather, rank, replay, update."""

    stages: ThreeStages
    learner: Learner  # of the network
    loss_learner: Learner | None = None  # of the loss's own parameters, which are the same on every rank

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Train on one global batch; every rank calls it with its own share.

        A DistapError on all ranks: no image has a positive, or the drift is too large; on one: its memory is short.
        """
        stages = self.stages
        described = stages.describe(batch)
        gathered, not_finite = stages.gather(described, batch)
        try:
            ranking = stages.rank(described.gathering, gathered, batch.step)
        except NothingToRankError:
            if not stages.world.sum(torch.tensor(len(not_finite), device=stages.world.device)):
                raise
            described.buffers.restore()
            return StepResult(NAN, learning_rate, NAN, NAN, 0, 0, 0, 0, "descriptor", not_finite)
        # All ranks take the same branch: `is_finite` and the norm are of the whole batch.
        worst, norm, replayed, kept = NAN, NAN, 0, 0
        if ranking.is_finite:
            worst, replayed, kept = stages.replay(batch, described, ranking)
            for parameter, gradient in zip(stages.loss.parameters, ranking.by_parameters, strict=True):
                parameter.grad = gradient
            with stages.stage("optimizer", batch.step):
                norm = self.learner.update(learning_rate)
                if self.loss_learner is not None and norm < float("inf"):
                    self.loss_learner.update(learning_rate)
        else:
            described.buffers.restore()  # a step that is skipped moves no statistics either
        skipped = None if norm < float("inf") else "gradient" if ranking.is_finite else "loss"
        counts = replayed, kept, ranking.queries, ranking.skipped_queries
        spread = float(gathered.descriptors.var(dim=0, correction=0).sum())
        return StepResult(float(ranking.loss), learning_rate, norm, worst, *counts, skipped, not_finite, spread)
