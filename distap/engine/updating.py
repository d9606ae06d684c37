"""One optimiser step along a gradient that is there: scale, norm, clipping. What DDP and FSDP have in common."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Updater:
    """A network's optimiser, with clipping and the scale of float16 gradients.

    Args:
        network: whose parameters move.
        optimizer: over them; a group's `factor` multiplies its learning rate.
        clip_norm: the gradient's norm is clipped to it; None leaves it alone.
        scaler: of float16 gradients.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, clip_norm: float | None, scaler: GradScaler | None
    ) -> None:
        self._network, self._optimizer, self._clip_norm, self._scaler = network, optimizer, clip_norm, scaler

    def scaled(self, gradient: Tensor) -> Tensor:
        """A gradient as the backward pass is to get it."""
        return gradient if self._scaler is None else self._scaler.scale(gradient)

    def update(self, learning_rate: float) -> float:
        """One step along the gradient, unless it is not finite; returns its norm and forgets it."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        trained = [parameter for parameter in self._network.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(trained, self._clip_norm, norm)
        length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("factor", 1.0)
        if length < float("inf"):  # False for NaN as well
            self._optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        self.discard()
        return length

    def discard(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of `optimizer.` by the names of the parameters, and of `scaler.`."""
        state = {}
        if self._optimizer.state:  # none before the first update
            optimizer: dict[str, Any] = dict(get_optimizer_state_dict(self._network, self._optimizer, options=FLAT))
            # Its settings are the recipe's, and the rate is given with every update.
            state = {f"optimizer.{name}": value for name, value in optimizer.items() if isinstance(value, Tensor)}
        if self._scaler is not None:
            scale = self._scaler.state_dict()
            state["scaler.scale"] = torch.tensor(scale["scale"], dtype=torch.float64)
            state["scaler.growth"] = torch.tensor(scale["_growth_tracker"])
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` of any engine gave; without a state of the optimiser it begins anew."""
        optimizer: dict[str, Any] = dict(_without_prefix("optimizer.", state))
        if optimizer:
            settings = get_optimizer_state_dict(self._network, self._optimizer, options=FLAT)
            given: dict[str, Any] = {
                name: sharded_like(settings.get(name), value) for name, value in optimizer.items()
            }
            set_optimizer_state_dict(self._network, self._optimizer, settings | given, options=FLAT)
        scale = _without_prefix("scaler.", state)
        if scale and self._scaler is not None:
            known = {"scale": float(scale["scale"]), "_growth_tracker": int(scale["growth"])}
            self._scaler.load_state_dict(self._scaler.state_dict() | known)


def network_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's part of an engine's state, by the network's own names."""
    return _without_prefix("network.", state)


def sharded_like(present: Any, given: Tensor) -> Tensor:
    """This rank's shard of a whole tensor that all ranks have, where the present one is a shard."""
    if not isinstance(present, DTensor) or isinstance(given, DTensor):
        return given
    if given.ndim == 0:
        given = given.reshape(present.shape)
    on_device = given.to(present.device)
    return distribute_tensor(on_device, present.device_mesh, present.placements, src_data_rank=None)


def _without_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
