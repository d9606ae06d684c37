"""DeepSpeed ZeRO: the ranks share out the optimiser's state, the gradients and the parameters among them.

Gradients are summed on each rank over the micro-batches of a step and reduced once, behind the last of them: also
with stages 2 and 3, which by themselves reduce in every backward pass.
"""

import inspect
import json
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler

from distap.engine.deepspeed.config import DeepSpeedSettings, complete, merged_config
from distap.engine.deepspeed.state import PREFIX, load_zero_state, zero_state
from distap.engine.precision import Precision
from distap.engine.protocol import BuildOptimizer
from distap.errors import DistapError
from distap.world import World

logger = logging.getLogger("distap")
_alone = 0  # engines in the process group that a lone process made for them


class DeepSpeedEngine:
    """The network under DeepSpeed.

    Args:
        network: on its device already, in float32, its parameters the same on every rank.
        build_optimizer: gives the optimiser over the network's parameters; a group's `factor` multiplies its rate.
        world: the ranks.
        settings: of this engine.
        clip_norm: the gradient's norm is clipped to it; None leaves it alone.
        precision: what the network computes in.
    Raises:
        DistapError: DeepSpeed is not installed or refuses the configuration, or a parameter is not float32.
    """

    def __init__(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        settings: DeepSpeedSettings | None = None,
        clip_norm: float | None = None,
        precision: Precision | None = None,
    ) -> None:
        settings = settings or DeepSpeedSettings()
        for name, parameter in network.named_parameters():
            if parameter.dtype != torch.float32:
                raise DistapError(f"{name} is {parameter.dtype}; DeepSpeed's own copies are float32, so it has to be")
        self._scalars = {name for name, parameter in network.named_parameters() if parameter.ndim == 0}
        for name, parameter in network.named_parameters():
            # DeepSpeed knows no other order of the elements, also not of a kernel of one pixel, and no scalars.
            parameter.data = parameter.data.reshape(-1).view(1 if name in self._scalars else parameter.shape)
        self.network = network
        self.lockstep = self._shares_parameters = settings.stage == 3
        self.keeps_graphs = not self._shares_parameters
        self.reductions, self.reduce_seconds = 0, 0.0
        self._world = world
        precision = precision or Precision()
        optimizer = build_optimizer()
        chosen = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._trained = {name: p for name, p in network.named_parameters() if p in chosen}
        config = merged_config(settings, world.size, sum(p.numel() for p in self._trained.values()), clip_norm)
        self._in_precision = _InPrecision(network, precision)
        self._engine = _initialized(self._in_precision, optimizer, world, settings, config)
        self._zero = self._engine.optimizer
        self._scale = _Scale(precision.scaler(), self._zero, world.device)
        self._is_whole = False
        weakref.finalize(self, _forget, self._engine)

    def describing(self) -> AbstractContextManager[None]:
        """Encloses forward passes of one rank alone: stage 3 gathers all parameters meanwhile."""
        return self._whole_parameters()

    @contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        if not self._shares_parameters or self._is_whole:
            yield
            return
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(self.network.parameters()))
        with self._world.collective("all_gather of the parameters"):
            gathered.__enter__()
        self._is_whole = True
        # The network's hooks would gather, release and compare notes with the other ranks in every forward pass.
        offload = self._zero.parameter_offload
        coordinator, offload.param_coordinator = offload.param_coordinator, _NothingToFetch()
        try:
            yield
        finally:
            offload.param_coordinator = coordinator
            self._is_whole = False
            gathered.__exit__(None, None, None)

    def describe(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, without a graph."""
        with torch.no_grad():
            descriptors: Tensor = self._in_precision(images)
        return descriptors

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, with a graph."""
        with self._sharing("all_gather of parameters in a forward pass"):
            descriptors: Tensor = self._engine(images)
        return descriptors

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Encloses forward and backward; the last one reduces."""
        # What DeepSpeed's own context does at its entrance. An open one would reduce on its way out also where this
        # rank fails, when nobody else does.
        self._engine.inside_no_sync_ctxt = self._zero._coalesce_grad_reduction = True
        yield
        if is_last:
            self._engine.inside_no_sync_ctxt = self._zero._coalesce_grad_reduction = False
            started = time.perf_counter()
            with self._world.collective("reduction of the gradients"), self._engine.coalesce_grad_reduction():
                pass
            self.reductions += 1
            self.reduce_seconds += time.perf_counter() - started

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that dL/d descriptors leads to."""
        # DeepSpeed wants a loss, and takes the mean over ranks.
        loss = (descriptors * gradient).sum() * self._world.size
        with self._sharing("all_gather of parameters in a backward pass"):
            self._engine.backward(loss)

    def update(self, learning_rate: float) -> float:
        """One optimiser step along the summed gradient, unless it is not finite; returns its norm."""
        for group in self._zero.param_groups:
            group["lr"] = learning_rate * group.get("factor", 1.0)
        self._engine.set_gradient_accumulation_boundary(True)
        with self._world.collective("update of the parameters"):
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        self._scale.update(norm)
        return norm

    def discard(self) -> None:
        """Forget the gradients."""
        for parameter in self._trained.values():
            parameter.grad = None  # stage 3 could not do so on a CPU
        self._zero.zero_grad()
        while self._zero._backward_active_depth:  # a backward pass that failed is not over by itself
            self._zero.exit_backward()
        if not self._shares_parameters:  # or an offloaded gradient would be added to this one
            self._zero.micro_step_id = -1

    def state_dict(self) -> dict[str, Tensor]:
        """Network and optimiser by the names of their parameters, whole and the same on every rank."""
        with self._whole_parameters():
            network = {f"network.{name}": tensor.detach() for name, tensor in self.network.state_dict().items()}
            if self._shares_parameters:
                network = {name: tensor.clone() for name, tensor in network.items()}
        with self._world.collective("gathering of the optimizer's state"):
            state = network | zero_state(self._zero, self._trained)
        for name in self._scalars:
            of_scalar = [key for key in state if key == f"network.{name}" or key.startswith(f"{PREFIX}{name}.")]
            state |= {key: state[key].reshape(()) for key in of_scalar}
        return state | self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` of any engine gave."""
        with self._world.collective("distribution of the parameters"):
            load_zero_state(self._zero, self.network, self._trained, state, self._scalars)
        self._scale.load_state_dict(state)

    def _sharing(self, name: str) -> AbstractContextManager[None]:
        """Encloses what communicates in stage 3 only."""
        return self._world.collective(name) if self._shares_parameters else nullcontext()


class _InPrecision(nn.Module):
    """What DeepSpeed wraps: it leaves any autocast around it, so this one is inside."""

    def __init__(self, network: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.network, self._precision = network, precision

    def forward(self, images: Tensor) -> Tensor:
        with self._precision.autocast():
            descriptors: Tensor = self.network(images)
        return descriptors


class _Scale:
    """The scale of float16 gradients: DeepSpeed applies it, and takes it away before clipping."""

    def __init__(self, scaler: GradScaler | None, zero: Any, device: torch.device) -> None:
        self._scaler, self._zero = scaler, zero
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # or it has no scale yet
            self._norm = nn.Parameter(torch.zeros((), device=device))
            self._watch = torch.optim.SGD([self._norm], lr=0.0)
            zero.override_loss_scale(scaler.get_scale())

    def update(self, norm: float) -> None:
        """Grow or shrink it, as the norm of the gradient was finite or not."""
        if self._scaler is not None:
            self._norm.grad = torch.full_like(self._norm, norm)
            self._scaler.unscale_(self._watch)
            self._scaler.update()
            self._zero.override_loss_scale(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Tensor]:
        """As other engines write it."""
        if self._scaler is None:
            return {}
        state = self._scaler.state_dict()
        return {
            "scaler.scale": torch.tensor(state["scale"], dtype=torch.float64),
            "scaler.growth": torch.tensor(state["_growth_tracker"]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another one's, where there was one."""
        if self._scaler is not None and "scaler.scale" in state:
            known = {"scale": float(state["scaler.scale"]), "_growth_tracker": int(state["scaler.growth"])}
            self._scaler.load_state_dict(self._scaler.state_dict() | known)
            self._zero.override_loss_scale(self._scaler.get_scale())


class _NothingToFetch:
    """Stands in for DeepSpeed's coordinator of parameters while all of them are there."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


def _initialized(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    settings: DeepSpeedSettings,
    config: dict[str, Any],
) -> Any:
    """DeepSpeed's own engine."""
    # Otherwise it looks for one by itself, and complains where it is a CPU.
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    try:
        import deepspeed
    except ImportError as error:
        raise DistapError(
            f"engine: deepspeed needs the package of that name: pip install 'distap[deepspeed]' ({error})"
        ) from error
    if world.device.type == "cpu":
        # It would compile collectives of its own, for another purpose, which takes a minute and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if world.size == 1:
        _join_group_of_one(world.device)
    try:
        complete(config)
        with world.collective("set-up of DeepSpeed"):
            engine, *_ = deepspeed.initialize(
                model=network, optimizer=optimizer, config=config, dist_init_required=False
            )
    except (ValueError, TypeError, AssertionError, NotImplementedError, deepspeed.DeepSpeedConfigError) as error:
        _leave_group_of_one()
        raise DistapError(
            f"{settings.config or 'engine'}: DeepSpeed {deepspeed.__version__} refuses its configuration: {error}"
        ) from error
    if world.rank == 0:
        logger.info("DeepSpeed %s: %s", deepspeed.__version__, json.dumps(config, sort_keys=True))
    return engine


def _join_group_of_one(device: torch.device) -> None:
    """DeepSpeed wants a process group also where there is nobody to talk to."""
    global _alone
    if _alone or not dist.is_initialized():
        _alone += 1
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _leave_group_of_one() -> None:
    global _alone
    if _alone:
        _alone -= 1
        if not _alone and dist.is_initialized():
            dist.destroy_process_group()


def _forget(engine: Any) -> None:
    """Let go of what DeepSpeed would keep for ever, so that the process group and its threads can end."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
    from deepspeed.utils import groups

    if dist.is_initialized():  # or DeepSpeed cannot tell which rank it is
        engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    # A cache without bounds, with coordinators and modules as its keys.
    remembers = inspect.getclosurevars(coordinator._PartitionedParameterCoordinator__params_to_release)
    remembers.nonlocals["func"].cache_clear()
    groups._release_process_group_references()
    _leave_group_of_one()
