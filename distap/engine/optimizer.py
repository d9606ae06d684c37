"""Optimisers of timm, and the parameter groups that they move."""

from dataclasses import dataclass
from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import nn
from torch.optim import Optimizer

from distap.engine.settings import GroupSettings


@dataclass(frozen=True)
class TimmOptimizer:
    """An optimiser of timm; None leaves an option at the optimiser's own default."""

    name: str = "adam"  # timm's name: `adam`, `adamw`, `sgd` (with Nesterov's momentum), `lion` and so on
    betas: tuple[float, float] | None = None  # decay rates of the running averages
    momentum: float | None = None  # of `sgd`, `momentum`, `rmsprop` and `lars`; timm's default is 0.9
    eps: float | None = None  # added to denominators

    def __post_init__(self) -> None:
        about = get_optimizer_info(self.name)
        for option in self._options():
            if not getattr(about, f"has_{option}"):
                raise ValueError(f"{option} is set, but the optimiser {self.name} has no {option}")

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimiser over groups of `params`, `weight_decay`, `factor` of the learning rate, and `name`."""
        options = self._options()
        if self.name == "lamb":
            options["max_grad_norm"] = None  # timm's would clip at 1; optimizer.clip_norm decides instead
        if self.name == "sgd" and self.momentum == 0:
            options["nesterov"] = False  # torch allows Nesterov's momentum only above 0
        # Not fused: on a CPU a fused step reads the moments in memory order, and the order of a restored moment may
        # differ from that of its channels-last parameter. The engine sets the rate of each step.
        return create_optimizer_v2(groups, self.name, lr=0.0, weight_decay=0.0, **options)

    def _options(self) -> dict[str, Any]:
        options = {"betas": self.betas, "momentum": self.momentum, "eps": self.eps}
        return {name: value for name, value in options.items() if value is not None}


def parameter_groups(parts: dict[str, tuple[nn.Module, GroupSettings]]) -> list[dict[str, Any]]:
    """Return one group for the matrices and kernels of each part, and one for its vectors, which never decay."""
    groups: list[dict[str, Any]] = []
    for part, (module, settings) in parts.items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        kernels, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        for name, decay, chosen in ((part, settings.weight_decay, kernels), (f"{part}.vectors", 0.0, vectors)):
            if chosen:
                groups.append({"name": name, "params": chosen, "factor": settings.factor, "weight_decay": decay})
    return groups
