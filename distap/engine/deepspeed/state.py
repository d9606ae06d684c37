"""The state of DeepSpeed's optimiser by the names of the parameters, as every engine reads and writes it."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distap.engine.updating import network_tensors

PREFIX = "optimizer.state."


def zero_state(zero: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Tensors `optimizer.state.NAME.KEY`, whole; a collective of all ranks.

    Args:
        zero: DeepSpeed's optimiser, of any stage.
        trained: the parameters that it moves, by name.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    states = list(zero.optimizer.state.items())
    if not states:  # none before the first update
        return {}
    _link(zero)
    flat, entry = states[0]
    tensors = {}
    for key, value in entry.items():
        for name, parameter in trained.items():
            of_parameter = f"{PREFIX}{name}.{key}"
            if value.shape == flat.shape:
                tensors[of_parameter] = safe_get_full_optimizer_state(parameter, key).cpu()
            else:
                tensors[of_parameter] = value.detach().clone()
    return tensors


def load_zero_state(
    zero: Any,
    network: nn.Module,
    trained: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
    scalars: Collection[str],
) -> None:
    """Take over what any engine's `state_dict` gave, whole tensors; a collective of all ranks.

    Without a state of the optimiser it stays as it is. `scalars` are the parameters that DeepSpeed has as vectors.
    """
    import deepspeed

    shared = [parameter for parameter in network.parameters() if hasattr(parameter, "ds_id")]
    # Stage 3 takes the values of rank 0; with the other stages there is nothing to gather.
    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0, enabled=bool(shared)):
        tensors = network_tensors(state)
        network.load_state_dict(tensors | {name: tensors[name].reshape(1) for name in scalars if name in tensors})
    for name, parameter in trained.items():
        _set(parameter, state[f"network.{name}"], None)
    moments = _by_key(state, trained)
    flats = zero.fp32_partitioned_groups_flat if shared else zero.single_partition_of_fp32_groups
    for key, values in moments.items():
        by_parameter = any(value.ndim for value in values.values())
        for flat in flats:
            entry = zero.optimizer.state[flat]
            if not by_parameter:  # the number of steps, which is the same for all
                entry[key] = next(iter(values.values())).detach().clone()
            elif key not in entry:
                entry[key] = torch.zeros_like(flat)
    if moments:
        _link(zero)
    for key, values in moments.items():
        if any(value.ndim for value in values.values()):
            for name, value in values.items():
                _set(trained[name], value, key)


def _link(zero: Any) -> None:
    """Let the parameters know their state, which DeepSpeed does behind an update of the first of several groups."""
    if hasattr(zero, "_hp_optimizer_states_linked"):  # stages 1 and 2
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _set(parameter: Any, value: Tensor, key: str | None) -> None:
    """Fill this rank's part of a parameter's master copy, or of its state `key`, from the whole of it."""
    from deepspeed import utils

    value = value.detach().to(parameter.device)
    if hasattr(parameter, "ds_id"):
        size, rank = parameter.ds_tensor.numel(), parameter.ds_process_group.rank()
        part = value.new_zeros(size)
        mine = value.flatten()[rank * size : (rank + 1) * size]
        part[: len(mine)] = mine
        if key is None:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, key)
    elif key is None:
        utils.safe_set_full_fp32_param(parameter, value)
    else:
        utils.safe_set_full_optimizer_state(parameter, value, key)


def _by_key(state: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    """key -> name of a parameter -> tensor, of the parameters that are trained."""
    by_key: dict[str, dict[str, Tensor]] = {}
    for of_parameter, tensor in state.items():
        name, _, key = of_parameter.removeprefix(PREFIX).rpartition(".")
        if of_parameter.startswith(PREFIX) and name in trained:
            by_key.setdefault(key, {})[name] = tensor
    return by_key
