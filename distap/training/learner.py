"""A network in training: its step, the update of its parameters, and the state of both."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distap.ranking.rank import NothingToRankError
from distap.stages.micro_batches import Batch
from distap.stages.replica import Replica
from distap.stages.step import ThreeStages

NAN = float("nan")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Learner:
    """Update a replica's parameters with the gradients that the three stages computed.

    Args:
        optimizer: over the network's parameters, or under FSDP over this rank's shards of them;
            `factor` of a group multiplies its learning rate, and `part` is what `held` names.
        clip_norm: greatest norm of the whole gradient; None never clips.
    """

    def __init__(
        self, replica: Replica, optimizer: Optimizer, clip_norm: float | None = None
    ) -> None:
        self.replica = replica
        self.network = replica.network
        self.world = replica.world
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        # values of `part` in the optimiser's groups that do not move
        self.held: Collection[str] = ()
        # of the trained parameters, or of this rank's shards of them
        self._average: dict[str, Tensor] = {}

    def update(self, learning_rate: float) -> float:
        """Update the parameters and clear the gradients.

        Returns the norm of the whole gradient before clipping. If it is not finite, nothing has
        moved.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if group.get("part") in self.held else ():
                parameter.grad = None
        # Without a gradient an optimiser leaves a parameter and its moments alone; with one of
        # zeros it would not.
        norm = nn.utils.get_total_norm(
            [one.grad for one in self.network.parameters() if one.grad is not None]
        )
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.network.parameters(), self._clip_norm, norm)
        with self.world.collective("norm of the gradient"):  # under FSDP each rank has a part of it
            length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        set_rates(self._optimizer, learning_rate)
        if length < float("inf"):  # False for NaN as well
            self._optimizer.step()
            if self._average:
                self._follow()
        self.replica.discard()
        return length

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of trained parameters from now on, with weight `decay`
        per step.
        """
        self._decay = decay
        named = self.network.named_parameters()
        self._average = {
            name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the parameters by their moving average, if one is kept; enter this before
        `describing`.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # In place: optimiser, FSDP and DeepSpeed hold on to the parameters' memory.
        self.replica.release()
        for mean, present in self._pairs():
            kept = present.clone()
            present.copy_(mean)
            mean.copy_(kept)

    def _follow(self) -> None:
        # An average of each number by itself, so that each rank averages its shards.
        get_ema_multi_avg_fn(self._decay)(*map(list, zip(*self._pairs(), strict=True)), None)

    @torch.no_grad()
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter's average with the parameter, as far as this rank holds them."""
        present = dict(self.network.named_parameters())
        return [(local(mean), local(present[name])) for name, mean in self._average.items()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors `network.*`, `ema.*` and `optimizer.*`, with the same names for every
        engine.

        Under FSDP they are this rank's shards, and single numbers whole and without dimensions.
        """
        self.replica.release()
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        if self._optimizer.state:  # empty before the first update
            optimizer: dict[str, Any] = dict(
                get_optimizer_state_dict(self.network, self._optimizer, options=_FLAT)
            )
            for name, value in optimizer.items():
                # The other values are settings, which come from the recipe. Some optimisers count
                # steps as int.
                if isinstance(value, Tensor) or name.endswith(".step"):
                    state[f"optimizer.{name}"] = torch.as_tensor(value)
        with self.world.collective("all_gather of scalars"):
            for name, tensor in state.items():
                if isinstance(tensor, DTensor) and tensor.numel() == 1:
                    state[name] = tensor.full_tensor().reshape(())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the learner from whole tensors of any engine's `state_dict`, on any number of
        ranks.
        """
        self.replica.release()
        present = self.network.state_dict()
        given: dict[str, Any] = {
            n: like(present.get(n), t) for n, t in without_prefix("network.", state).items()
        }
        self.network.load_state_dict(given)
        self._load_average(state)
        # A checkpoint from before the first update, as when all steps were skipped, has no state of
        # the optimiser.
        optimizer = without_prefix("optimizer.", state)
        if optimizer:
            settings: dict[str, Any] = get_optimizer_state_dict(
                self.network, self._optimizer, options=_FLAT
            )
            given = {name: like(settings.get(name), value) for name, value in optimizer.items()}
            set_optimizer_state_dict(self.network, self._optimizer, settings | given, options=_FLAT)
            moved = {name.removeprefix("state.").rpartition(".")[0] for name in optimizer}
            for name, parameter in self.network.named_parameters():
                if name not in moved:  # torch has made a state for it, which it did not have
                    self._optimizer.state.pop(parameter, None)

    def _load_average(self, state: Mapping[str, Tensor]) -> None:
        """Continue the average, or start one at the parameters if there was none."""
        averages = without_prefix("ema.", state) or without_prefix("network.", state)
        for name, mean in self._average.items():
            mean.copy_(like(mean, averages[name]))


@dataclass(frozen=True)
class StepResult:
    """The outcome of a training step, with loss and counts of the whole global batch."""

    loss: float
    learning_rate: float
    gradient_norm: float
    # greatest difference between the two descriptors of an image, over all ranks
    replay_drift: float
    replayed: int  # images with a gradient that were described a second time
    kept: int  # images with a gradient whose graph was kept instead
    skipped_queries: int  # images without another image of their class
    # why the parameters did not move: 'descriptor', 'loss' or 'gradient' was not finite
    skipped: str | None = None
    # rows of this rank whose descriptor was not finite
    not_finite: list[int] = field(default_factory=list)
    # mean squared distance of the batch's descriptors to their mean; 0 if all are alike
    spread: float = NAN


@dataclass(frozen=True)
class TrainingStep:
    """A training step: describe, gather, rank, replay, update."""

    stages: ThreeStages
    learner: Learner  # of the network
    # of the loss's own parameters, which are the same on every rank
    loss_learner: Learner | None = None

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Train on one global batch; every rank calls it with its own share.

        A DistapError on all ranks: no image has a positive, or the drift is too large; on one: its
        memory is short.
        """
        stages = self.stages
        described = stages.describe(batch)
        gathered = stages.gather(described, batch)
        not_finite = described.lost
        try:
            ranking = stages.rank(described.gathering, gathered, batch.step)
        except NothingToRankError:
            # Positives may be missing because descriptors that are not finite were left out: skip
            # such a step. If no rank has left any out, the batch itself has no pairs, which a
            # person has to mend.
            if not stages.world.sum(torch.tensor(len(not_finite), device=stages.world.device)):
                raise
            described.buffers.restore()
            return StepResult(NAN, learning_rate, NAN, NAN, 0, 0, 0, "descriptor", not_finite)
        # All ranks take the same branch: `is_finite` and the norm are of the whole batch.
        worst = NAN
        norm = NAN
        replayed = 0
        kept = 0
        if ranking.is_finite:
            worst, replayed, kept = stages.replay(batch, described, ranking)
            for parameter, gradient in zip(
                stages.loss.parameters, ranking.by_parameters, strict=True
            ):
                parameter.grad = gradient
            with stages.stage("optimizer", batch.step):
                norm = self.learner.update(learning_rate)
                if self.loss_learner is not None and norm < float("inf"):
                    self.loss_learner.update(learning_rate)
        else:
            described.buffers.restore()  # a step that is skipped moves no statistics either
        skipped = None if norm < float("inf") else "gradient" if ranking.is_finite else "loss"
        counts = replayed, kept, ranking.skipped_queries
        return StepResult(
            float(ranking.loss),
            learning_rate,
            norm,
            worst,
            *counts,
            skipped,
            not_finite,
            ranking.spread,
        )


def set_rates(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of each group to `learning_rate` times its `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("factor", 1.0)


def without_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return entries whose name starts with `prefix`, named without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(present: Any, given: Tensor) -> Any:
    """Return this rank's shard of a whole tensor if `present` is sharded, or a number if `present`
    is one.
    """
    if isinstance(present, int):
        return int(given)
    # FSDP and DeepSpeed hold a single number as a vector
    if given.numel() == 1 and isinstance(present, Tensor):
        given = given.reshape(present.shape)
    if not isinstance(present, DTensor):
        return given
    # Every rank has read the whole tensor and cuts its shard out of that; without None, rank 0
    # would send them all.
    return distribute_tensor(
        given.to(present.device), present.device_mesh, present.placements, src_data_rank=None
    )
