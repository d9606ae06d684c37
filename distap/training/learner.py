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
from distap.training.optimizer import trained_parameters
from distap.world import local

NAN = float("nan")
Tensors = Mapping[str, Tensor]  # by name
OF_OPTIMIZER = "optimizer.state."  # prefix of the state of each parameter
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Learner:
    """Update a replica's parameters with the gradients that the three stages computed.

    Args:
        optimizer: over the network's parameters, or under FSDP over this rank's shards of them;
            `factor` of a group multiplies its learning rate, and `part` is what `held` names.
        clip_norm: greatest norm of the whole gradient; None never clips.
    """

    loss_scale = 1.0  # factor on the gradients that `update` finds
    skip_reason = "gradient"  # what was not finite, if `update` has moved nothing

    def __init__(
        self, replica: Replica, optimizer: Optimizer, clip_norm: float | None = None
    ) -> None:
        self.replica = replica
        self.network = replica.network
        self.world = replica.world
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self.held: Collection[str] = ()  # values of `part` of the groups that do not move
        # Moving averages of the trained parameters, or of this rank's shards of them.
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
            [
                parameter.grad
                for parameter in self.network.parameters()
                if parameter.grad is not None
            ]
        )
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.network.parameters(), self._clip_norm, norm)
        # Under FSDP each rank has a part of the norm.
        with self.world.collective("norm of the gradient"):
            length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        set_rates(self._optimizer, learning_rate)
        if length < float("inf"):  # False for NaN as well
            self._optimizer.step()
            if self._average:
                self._follow()
        self.replica.discard()
        return length

    def keep_average(self, decay: float) -> None:
        """Average trained parameters from now on; each step keeps `decay` of the average."""
        self._decay = decay
        self._average = {
            name: parameter.detach().clone() for name, parameter in trained_parameters(self.network)
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the parameters by their moving average, if there is one.

        Enter this before `Replica.whole`.
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
            trained = present.clone()
            present.copy_(mean)
            mean.copy_(trained)

    def _follow(self) -> None:
        # An average of each number by itself, so that each rank averages its shards.
        get_ema_multi_avg_fn(self._decay)(*map(list, zip(*self._pairs(), strict=True)), None)

    @torch.no_grad()
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter's average with the parameter, as far as this rank holds them."""
        present = dict(self.network.named_parameters())
        return [(local(mean), local(present[name])) for name, mean in self._average.items()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors `network.*`, `ema.*` and `optimizer.*`, named alike for every engine.

        Under FSDP they are this rank's shards, but single numbers are whole and without dimensions.
        """
        self.replica.release()
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        if self._optimizer.state:  # empty before the first update
            optimizer: Mapping[str, Any] = get_optimizer_state_dict(
                self.network, self._optimizer, options=_FLAT
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

    def shard_of(self, name: str, shape: torch.Size) -> DTensor | None:
        """Return a DTensor with this rank's shard of a tensor that `load_state_dict` takes.

        None stands for a whole tensor. The values are not those of the tensor.
        """
        _, _, path = name.partition(".")
        # network.NAME, ema.NAME, or optimizer.state.NAME.KEY
        of_parameter = path
        if name.startswith(OF_OPTIMIZER):
            of_parameter = name.removeprefix(OF_OPTIMIZER).rpartition(".")[0]
        try:
            parameter: Any = self.network.get_parameter(of_parameter)
        except AttributeError:  # a buffer, or a setting
            return None
        return parameter if isinstance(parameter, DTensor) and parameter.shape == shape else None

    def load_state_dict(self, state: Tensors) -> None:
        """Restore the learner from tensors of any engine's `state_dict`.

        They are whole, or this rank's shards where `shard_of` gives one. The number of ranks may be
        another than when they were saved.
        """
        self.replica.release()
        self.network.load_state_dict(
            all_like(self.network.state_dict(), without_prefix("network.", state))
        )
        self._load_average(state)
        # A checkpoint from before the first update, as when all steps were skipped, has no state of
        # the optimiser.
        optimizer = without_prefix("optimizer.", state)
        if optimizer:
            settings: dict[str, Any] = get_optimizer_state_dict(
                self.network, self._optimizer, options=_FLAT
            )
            settings |= all_like(settings, optimizer)
            set_optimizer_state_dict(self.network, self._optimizer, settings, options=_FLAT)
            moved = {name.removeprefix("state.").rpartition(".")[0] for name in optimizer}
            for name, parameter in self.network.named_parameters():
                if name not in moved:  # torch has made a state, which it had not when saved
                    self._optimizer.state.pop(parameter, None)

    def _load_average(self, state: Tensors) -> None:
        """Continue the average, or start one at the parameters if there was none."""
        averages = without_prefix("ema.", state) or without_prefix("network.", state)
        for name, mean in self._average.items():
            mean.copy_(like(mean, averages[name]))


@dataclass(frozen=True)
class StepResult:
    """The outcome of a training step, with loss and counts of the whole global batch."""

    loss: float
    learning_rate: float
    gradient_norm: float = NAN
    # Greatest difference between the two descriptors of an image, over all ranks.
    replay_drift: float = NAN
    # Images with a gradient: those that were described a second time, and those whose graph was
    # kept instead.
    replayed: int = 0
    kept: int = 0
    loss_scale: float = 1.0  # for the next step
    skipped_queries: int = 0  # images without another image of their class
    # Why the parameters did not move: 'descriptor', 'loss' or 'gradient' was not finite, or an
    # 'overflow' of the scaled gradient, after which the loss scale is smaller.
    skipped: str | None = None
    # Rows of this rank whose descriptor was not finite.
    not_finite: list[int] = field(default_factory=list)
    # Mean squared distance of the batch's descriptors to their mean; 0 if all are alike.
    spread: float = NAN
    # (b,) loss of each of this rank's images, NaN for one without positives; None: not by query.
    per_query: Tensor | None = None


@dataclass(frozen=True)
class TrainingStep:
    """A training step: describe, gather, rank, replay, update."""

    stages: ThreeStages
    learner: Learner  # of the network
    # of the loss's own parameters, which are the same on every rank
    loss_learner: Learner | None = None

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Train on one global batch; every rank calls it with its own share.

        Raises:
            DistapError: on all ranks, if no image has a positive or the drift is too large; on one
                rank, if its memory is too small.
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
            return StepResult(
                loss=NAN,
                learning_rate=learning_rate,
                loss_scale=self.learner.loss_scale,
                skipped="descriptor",
                not_finite=not_finite,
            )

        # All ranks take the same branch: `is_finite` and the norm are of the whole batch.
        skipped: str | None = "loss"
        norm = drift = NAN
        replayed = with_kept_graph = 0
        if ranking.is_finite:
            gradient = ranking.gradient * self.learner.loss_scale
            drift, replayed, with_kept_graph = stages.replay(batch, described, gradient)
            for parameter, of_loss in zip(
                stages.loss.parameters, ranking.by_parameters, strict=True
            ):
                parameter.grad = of_loss
            with stages.stage("optimizer", batch.step):
                norm = self.learner.update(learning_rate)
                if norm < float("inf"):
                    skipped = None
                    if self.loss_learner is not None:
                        self.loss_learner.update(learning_rate)
                else:
                    skipped = self.learner.skip_reason
        else:
            described.buffers.restore()  # a step that is skipped moves no statistics either
        return StepResult(
            loss=float(ranking.loss),
            learning_rate=learning_rate,
            gradient_norm=norm,
            replay_drift=drift,
            replayed=replayed,
            kept=with_kept_graph,
            loss_scale=self.learner.loss_scale,
            skipped_queries=ranking.skipped_queries,
            skipped=skipped,
            not_finite=not_finite,
            spread=ranking.spread,
            per_query=ranking.per_query,
        )


def set_rates(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of each group to `learning_rate` times its `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("factor", 1.0)


def without_prefix(prefix: str, state: Tensors) -> dict[str, Tensor]:
    """Return entries whose name starts with `prefix`, named without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def all_like(present: Mapping[str, Any], loaded: Tensors) -> dict[str, Any]:
    """Return `like(present, tensor)` for all loaded tensors, by name."""
    return {name: like(present.get(name), tensor) for name, tensor in loaded.items()}


def like(present: Any, loaded: Tensor) -> Any:
    """Convert a whole tensor to the kind of `present`: a number, or this rank's shard.

    A shard stays as it is.
    """
    if isinstance(loaded, DTensor):
        return loaded
    if isinstance(present, int):
        return int(loaded)
    # FSDP and DeepSpeed hold a single number as a vector.
    if loaded.numel() == 1 and isinstance(present, Tensor):
        loaded = loaded.reshape(present.shape)
    if not isinstance(present, DTensor):
        return loaded
    # Every rank has read the whole tensor and cuts its shard out of that; without None, rank 0
    # would send them all.
    return distribute_tensor(
        loaded.to(present.device), present.device_mesh, present.placements, src_data_rank=None
    )
