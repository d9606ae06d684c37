"""ZeRO's learner: DeepSpeed updates the parameters and holds the optimiser's state."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distap.errors import DistapError
from distap.stages.deepspeed import ZeroReplica
from distap.training.learner import Learner, Tensors, all_like, set_rates, without_prefix

# Optimisers whose steps depend on the norm or the shape of a whole tensor, while ZeRO gives them
# flat slices of many tensors.
WHOLE_TENSORS = ("Lamb", "Lars", "Adafactor")
PREFIX = "optimizer.state."


class ZeroLearner(Learner):
    """A learner that leaves clipping, the optimiser's step and its state to DeepSpeed."""

    replica: ZeroReplica

    def update(self, learning_rate: float) -> float:
        engine = self.replica.engine
        set_rates(self.replica.zero, learning_rate)
        engine.set_gradient_accumulation_boundary(True)
        with self.world.collective("update of the parameters"):
            engine.step()
            norm = float(engine.get_global_grad_norm())
        if norm < float("inf") and self._average:  # False for NaN as well
            self._follow()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        with self.replica.describing():
            state = {
                f"network.{name}": tensor.detach()
                for name, tensor in self.network.state_dict().items()
            }
            if self.replica.lockstep:
                state = {name: tensor.clone() for name, tensor in state.items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        with self.world.collective("gathering of the optimizer's state"):
            state |= zero_state(self.replica.zero, self.replica.trained)
        return {
            name: tensor.reshape(()) if tensor.numel() == 1 else tensor
            for name, tensor in state.items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        with self.world.collective("distribution of the parameters"):
            load_zero_state(self.replica.zero, self.network, self.replica.trained, state)
        self._load_average(state)


def check_for_zero(network: nn.Module, optimizer: Optimizer) -> None:
    """Raise a DistapError if ZeRO cannot hold these parameters or work with this optimiser."""
    for name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32:
            raise DistapError(
                "engine.wrong_precision",
                f"{name} is {parameter.dtype}, but the deepspeed engine needs float32 parameters",
            )
    if type(optimizer).__name__ in WHOLE_TENSORS:
        raise DistapError(
            "engine.needs_whole_tensors",
            "the deepspeed engine gives the optimiser slices of the parameters, but"
            f" {type(optimizer).__name__} needs whole ones; choose another optimizer.name, or the"
            " engine ddp or fsdp",
        )


def zero_state(zero: Any, trained: Tensors) -> dict[str, Tensor]:
    """Return whole tensors `optimizer.state.NAME.KEY` of trained parameters.

    Call it on all ranks together.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    states = list(zero.optimizer.state.items())
    if not states:  # before the first update
        return {}
    _link(zero)
    flat, entry = states[0]
    return {
        f"{PREFIX}{name}.{key}": (
            safe_get_full_optimizer_state(parameter, key).cpu()
            if value.shape == flat.shape
            else value.detach().clone()
        )
        for key, value in entry.items()
        for name, parameter in trained.items()
    }


def load_zero_state(zero: Any, network: nn.Module, trained: Tensors, state: Tensors) -> None:
    """Load whole tensors of any engine's `state_dict`; call it on all ranks together.

    If they hold no state of the optimiser, it stays as it is.
    """
    import deepspeed

    shared = [parameter for parameter in network.parameters() if hasattr(parameter, "ds_id")]
    # Stage 3 takes the values of rank 0; the other stages have nothing to gather.
    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0, enabled=bool(shared)):
        network.load_state_dict(all_like(network.state_dict(), without_prefix("network.", state)))
    # ZeRO moves a float32 copy of each parameter and then overwrites the parameter with it, so load
    # into both.
    for name, parameter in trained.items():
        _set(parameter, state[f"network.{name}"], None)

    moments = defaultdict[str, dict[str, Tensor]](dict)  # key -> name of a parameter -> tensor
    for path, tensor in without_prefix(PREFIX, state).items():
        name, _, key = path.rpartition(".")
        if name in trained:
            moments[key][name] = tensor
    if moments:
        if shared:  # stage 3
            slices = zero.fp32_partitioned_groups_flat
        else:
            slices = zero.single_partition_of_fp32_groups
        _load_moments(zero, trained, moments, slices)


def _load_moments(
    zero: Any, trained: Tensors, moments: Mapping[str, Tensors], slices: Sequence[Tensor]
) -> None:
    """Load the optimiser's state: whole tensors by key and parameter.

    `slices` are this rank's flat slices of the parameters, one for each group, which the state is
    kept by.
    """
    by_parameter = {
        key: tensors
        for key, tensors in moments.items()
        if any(tensor.ndim for tensor in tensors.values())
    }
    for flat in slices:
        entry = zero.optimizer.state[flat]
        for key, tensors in moments.items():
            if key not in by_parameter:  # the number of steps, the same for all
                entry[key] = next(iter(tensors.values())).detach().clone()
            elif key not in entry:
                entry[key] = torch.zeros_like(flat)
    _link(zero)
    for key, tensors in by_parameter.items():
        for name, tensor in tensors.items():
            _set(trained[name], tensor, key)


def _link(zero: Any) -> None:
    # DeepSpeed gives parameters access to their state only after an update of the first group,
    # which may have none.
    if hasattr(zero, "_hp_optimizer_states_linked"):  # stages 1 and 2
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _set(parameter: Any, value: Tensor, key: str | None) -> None:
    """Fill this rank's part of a parameter's float32 copy, or of its state `key`.

    `value` is the whole tensor.
    """
    from deepspeed import utils

    value = value.detach().to(parameter.device)
    kind = "local" if hasattr(parameter, "ds_id") else "full"
    if kind == "local":  # stage 3 holds slices of the same size, the last one padded
        size = parameter.ds_tensor.numel()
        start = parameter.ds_process_group.rank() * size
        shard = value.flatten()[start : start + size]
        value = torch.cat([shard, shard.new_zeros(size - len(shard))])
    if key is None:
        getattr(utils, f"safe_set_{kind}_fp32_param")(parameter, value)
    else:
        getattr(utils, f"safe_set_{kind}_optimizer_state")(parameter, value, key)
