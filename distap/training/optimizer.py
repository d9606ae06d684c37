"""Optimisers of timm, and the parameter groups that they update."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distap.config.sections import GroupSettings
from distap.errors import DistapError
from distap.stages.bunches import bunches
from distap.world import local

# Of a group of parameters. On a GPU an optimiser updates a group at once, and takes as much memory
# again meanwhile.
GROUP_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TimmOptimizer:
    """An optimiser of timm; None keeps the optimiser's default for an option."""

    # timm's name: `adam`, `adamw`, `sgd` (with Nesterov's momentum), `lion` and so on.
    name: str = "adam"
    betas: tuple[float, float] | None = None
    """Decay rates of the optimiser's running averages of the gradient and its square."""
    momentum: float | None = None
    """Momentum of `sgd`, `momentum`, `rmsprop` and `lars`; timm's default is 0.9."""
    eps: float | None = None
    """Small number added to denominators of the update, against division by zero."""

    def __post_init__(self) -> None:
        for option in self._options():
            from timm import optim  # here and below, since the import takes seconds

            if not getattr(optim.get_optimizer_info(self.name), f"has_{option}"):
                raise ValueError(f"{option} is set, but the optimiser {self.name} has no {option}")

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimiser of groups: `params`, `weight_decay`, and a `factor` on the rate."""
        from timm import optim

        options = self._options()
        if self.name == "lamb":
            options["max_grad_norm"] = None  # timm would clip at 1, but optimizer.clip_norm decides
        if self.name == "sgd" and self.momentum == 0:
            options["nesterov"] = False  # torch allows Nesterov's momentum only above 0
        groups = [
            group | {"params": parameters}
            for group in groups
            for parameters in bunches(
                group["params"], lambda parameter: local(parameter).nbytes, GROUP_BYTES
            )
        ]
        # Not fused: on a CPU a fused step reads the moments in memory order, and the order of a
        # restored moment may differ from that of its channels-last parameter. The engine sets the
        # rate of each step.
        return optim.create_optimizer_v2(groups, self.name, lr=0.0, weight_decay=0.0, **options)

    def _options(self) -> dict[str, Any]:
        options = {"betas": self.betas, "momentum": self.momentum, "eps": self.eps}
        return {name: value for name, value in options.items() if value is not None}


def trained_parameters(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not frozen, with their names."""
    return [named for named in network.named_parameters() if named[1].requires_grad]


def parameter_groups(
    modules: Mapping[str, tuple[nn.Module, GroupSettings]], layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return timm's groups of the trained parameters of each module, with its name as `part`.

    Weights do not decay in vectors, nor in parameters that timm's network excludes, such as
    position embeddings. With `layer_decay`, each layer of the backbone has groups of its own.
    """
    from timm import optim

    groups: list[dict[str, Any]] = []
    for name, (module, settings) in modules.items():
        without_decay: Collection[str] = getattr(module, "no_weight_decay", tuple)()
        if layer_decay is None or name != "backbone":
            added = optim.param_groups_weight_decay(
                module, settings.weight_decay, no_weight_decay_list=without_decay
            )
        elif hasattr(module, "group_matcher"):
            added = optim.param_groups_layer_decay(
                module,
                settings.weight_decay,
                no_weight_decay_list=without_decay,
                layer_decay=layer_decay,
            )
        else:
            raise DistapError(
                "network.no_layers",
                f"optimizer.layer_decay: {type(module).__name__} is no network of timm, which has"
                " layers",
            )
        # The rate of a step is set later, as a multiple of this factor.
        for group in added:
            group["part"] = name
            group["factor"] = settings.factor * group.pop("lr_scale", 1.0)
        groups += added
    return groups
