"""The optimiser, its parameter groups, and the learning rate of each step."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class LinearDecay:
    """The learning rate rises linearly over the warm-up and falls linearly to zero, as Revaud et al. train.

    Args:
        learning_rate: its greatest value.
        warmup: steps of the rise.
        steps: of the whole training.
    """

    learning_rate: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of a step, counted from 0; positive for all of them."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        return self.learning_rate * (self.steps - step) / max(self.steps - self.warmup, 1)


@dataclass(frozen=True)
class GroupSettings:
    """How one part of the network learns.

    Args:
        factor: multiplies the learning rate; 0 keeps the part as it is.
        weight_decay: of its matrices and kernels; biases, scales and the pooling's power have none.
    """

    factor: float = 1.0
    weight_decay: float = 0.0

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section


def build_optimizer(
    name: Literal["adam", "adamw"],
    parts: dict[str, tuple[nn.Module, GroupSettings]],
    betas: tuple[float, float] = (0.9, 0.999),
) -> Optimizer:
    """Adam or AdamW with a parameter group for each part of the network and kind of parameter.

    Args:
        name: `adam` adds weight decay to the gradient, `adamw` shrinks the weights instead.
        parts: part's name -> (module, how it learns).
        betas: Adam's.
    """
    groups: list[dict[str, Any]] = []
    for part, (module, settings) in parts.items():
        parameters = [p for p in module.parameters() if p.requires_grad]
        for suffix, decay, chosen in (
            ("", settings.weight_decay, [p for p in parameters if p.ndim > 1]),
            (".vectors", 0.0, [p for p in parameters if p.ndim <= 1]),
        ):
            if chosen:
                groups.append(
                    {"name": part + suffix, "params": chosen, "factor": settings.factor, "weight_decay": decay}
                )
    # Not fused: on a CPU that takes a moment's elements in the order of memory, which in a state that was read again
    # need not be that of a parameter that is channels-last.
    return OPTIMIZERS[name](groups, lr=0.0, betas=betas)  # type: ignore[call-arg]
