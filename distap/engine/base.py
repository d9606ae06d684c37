"""What the three stages ask of a network on many ranks, and what the engines that spread it share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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

from distap.engine.precision import LossScale, autocast
from distap.engine.settings import PrecisionName
from distap.world import World

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Replica(ABC):
    """A network on this rank as the three stages use it: it describes, and it sends gradients back."""

    network: nn.Module
    lockstep = False  # each micro-batch communicates, so all ranks must replay the same number of them
    reduces_in_backward = True  # the last backward pass of a step communicates
    keeps_graphs = True  # `forward` may be called several times before the backward passes

    @property
    def reduce_seconds(self) -> float:
        """Seconds that this rank has waited for other ranks' parameters and gradients so far."""
        return 0.0

    def describing(self) -> AbstractContextManager[None]:
        """Enclose stage one or an evaluation: parameters are whole inside, so each rank describes on its own."""
        return nullcontext()

    def describe(self, images: Any) -> Tensor:
        """Return descriptors (n, C), float32 or wider, without a graph; call it inside `describing`."""
        with torch.no_grad():
            return self.forward(images)

    @abstractmethod
    def forward(self, images: Any) -> Tensor:
        """Return descriptors (n, C), float32 or wider, with a graph.

        Call it inside `accumulating`; an engine that keeps graphs also allows it inside `describing`.
        """

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward pass of a micro-batch, or the backward pass of a kept graph.

        Ranks reduce gradients only in the last one of a step, unless they work in lockstep.
        """
        return nullcontext()

    @abstractmethod
    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that follow from dL/d descriptors, `gradient` (n, C)."""

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients, because the step is skipped or its replay starts again."""


class Engine(Replica):
    """A network spread over the ranks, and its optimiser; subclasses add the reduction of gradients.

    Parameters move along the sum over ranks of what `backward` was given, because stage two has already divided by
    the global number of queries.

    Args:
        network: on its device already; ranks take the parameters of rank 0.
        build_optimizer: returns the optimiser over the network's parameters, which FSDP has replaced by shards then;
            `factor` of a group multiplies its learning rate, and `part` is what `held` names.
        clip_norm: greatest norm of the whole gradient; None never clips.
        precision: dtype of the network's arithmetic.
        settings: of the subclass; None takes the defaults.
    """

    def __init__(
        self,
        network: nn.Module,
        build_optimizer: Callable[[], Optimizer],
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
        *,
        settings: Any = None,
    ) -> None:
        self.network, self.world, self._clip_norm = network, world, clip_norm
        self._autocast = partial(autocast, precision, world.device.type)
        self._scale = LossScale(precision)
        self._reduces = False  # in the next backward pass
        self._spread(settings)
        self._optimizer = build_optimizer()
        self.held: Collection[str] = ()  # values of `part` in the optimiser's groups that do not move
        self._average: dict[str, Tensor] = {}  # of the trained parameters, or of this rank's shards of them

    @abstractmethod
    def _spread(self, settings: Any) -> None:
        """Prepare the network for the ranks."""

    def forward(self, images: Tensor) -> Tensor:
        with self._autocast():
            return self.network(images)

    def update(self, learning_rate: float | None) -> float:
        """Move the parameters and clear the gradients.

        None leaves the rates of the optimiser's groups alone, as for a schedule of one's own.

        Returns the norm of the whole gradient before clipping. If it is not finite, nothing has moved.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if group.get("part") in self.held else ():
                parameter.grad = None
        trained = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if self._scale.scale != 1:
            for gradient in gradients:
                gradient.div_(self._scale.scale)
        norm = nn.utils.get_total_norm(gradients)
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(trained, self._clip_norm, norm)
        length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        set_rates(self._optimizer, learning_rate)
        is_finite = length < float("inf")  # False for NaN as well
        if is_finite:
            self._optimizer.step()
            self._follow()
        self._scale.update(is_finite)
        self.discard()
        return length

    def discard(self) -> None:
        self.network.zero_grad()  # under FSDP these may be whole parameters beside the optimiser's shards
        self._optimizer.zero_grad()

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the trained parameters from now on, with weight `decay` a step."""
        self._decay = decay
        named = self.network.named_parameters()
        self._average = {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average, if there is one, in the place of the parameters; enter it before `describing`."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for mean, present in self._pairs():
            kept = present.clone()
            present.copy_(mean)
            mean.copy_(kept)

    def _follow(self) -> None:
        """Move the average towards the parameters; on shards, this is what it is on whole tensors."""
        if pairs := self._pairs():
            get_ema_multi_avg_fn(self._decay)(*map(list, zip(*pairs, strict=True)), None)

    @torch.no_grad()
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The average of each parameter, and the parameter, as far as this rank holds them."""
        present = dict(self.network.named_parameters()) if self._average else {}
        return [(local(mean), local(present[name])) for name, mean in self._average.items()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors `network.*`, `ema.*`, `optimizer.*` and `scaler.*`, named the same by every engine."""
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        if self._optimizer.state:  # empty before the first update
            optimizer: dict[str, Any] = dict(get_optimizer_state_dict(self.network, self._optimizer, options=_FLAT))
            for name, value in optimizer.items():
                # The other values are settings, which come from the recipe. Some optimisers count steps as int.
                if isinstance(value, Tensor) or name.endswith(".step"):
                    state[f"optimizer.{name}"] = torch.as_tensor(value)
        return state | self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from whole tensors, the `state_dict` of any engine on any number of ranks."""
        present = self.network.state_dict()
        given: dict[str, Any] = {n: _like(present.get(n), t) for n, t in without_prefix("network.", state).items()}
        self.network.load_state_dict(given)
        self._load_average(state)
        optimizer = without_prefix("optimizer.", state)
        if optimizer:
            settings: dict[str, Any] = get_optimizer_state_dict(self.network, self._optimizer, options=_FLAT)
            given = {name: _like(settings.get(name), value) for name, value in optimizer.items()}
            set_optimizer_state_dict(self.network, self._optimizer, settings | given, options=_FLAT)
            moved = {name.removeprefix("state.").rpartition(".")[0] for name in optimizer}
            for name, parameter in self.network.named_parameters():
                if name not in moved:  # torch has made a state for it, which it did not have
                    self._optimizer.state.pop(parameter, None)
        self._scale.load_state_dict(state)

    def _load_average(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the average, or begin one at the parameters if there was none."""
        averages = without_prefix("ema.", state) or without_prefix("network.", state)
        for name, mean in self._average.items():
            mean.copy_(_like(mean, averages[name].reshape(mean.shape)))


def set_rates(optimizer: Any, learning_rate: float | None) -> None:
    """Set each group's rate to its factor of the learning rate; None leaves the rates alone."""
    for group in () if learning_rate is None else optimizer.param_groups:
        group["lr"] = learning_rate * group.get("factor", 1.0)


class ReplacedForward(nn.Module):
    """A network whose forward pass is another function, to hand to a wrapper such as DDP or DeepSpeed."""

    def __init__(self, network: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self._replacement = network, replacement

    def forward(self, value: Tensor) -> Tensor:
        return self._replacement(value)


def make_contiguous(network: nn.Module) -> set[str]:
    """Make every parameter contiguous and at least one-dimensional; return the names of those without dimensions."""
    scalars = {name for name, parameter in network.named_parameters() if parameter.ndim == 0}
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.reshape(-1).view(1 if name in scalars else parameter.shape)
    return scalars


def without_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries whose name starts with `prefix`, by the rest of their name."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or all of one that is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(present: Any, given: Tensor) -> Any:
    """Return this rank's shard of a whole tensor if `present` is a shard, a number if it is one."""
    if isinstance(present, int):
        return int(given)
    if not isinstance(present, DTensor):
        return given
    whole = given.reshape(present.shape) if given.ndim == 0 else given
    return distribute_tensor(whole.to(present.device), present.device_mesh, present.placements, src_data_rank=None)
