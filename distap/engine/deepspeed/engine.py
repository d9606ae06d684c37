"""DeepSpeed ZeRO: ranks share out the optimiser's state, the gradients and the parameters.

Each rank sums its gradients over the micro-batches of a step, and the ranks reduce them once, after the last one.
On their own, stages 2 and 3 would reduce in every backward pass.
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

import timm.optim
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from distap.engine.base import Engine, ReplacedForward, make_contiguous, set_rates
from distap.engine.deepspeed.config import DeepSpeedSettings, merged_config
from distap.engine.deepspeed.state import PREFIX, load_zero_state, zero_state
from distap.errors import DistapError

# Their steps depend on the norm or the shape of a whole tensor, but ZeRO gives them flat slices of many tensors.
WHOLE_TENSORS = (timm.optim.Lamb, timm.optim.Lars, timm.optim.Adafactor)
logger = logging.getLogger("distap")


class DeepSpeedEngine(Engine):
    """The network under DeepSpeed; it has to have the same parameters on every rank."""

    reduce_seconds = 0.0

    def __init__(self, *parts: Any, settings: DeepSpeedSettings, **more: Any) -> None:
        super().__init__(*parts, **more, settings=settings)
        optimizer = self._optimizer
        if isinstance(optimizer, WHOLE_TENSORS):
            raise DistapError(
                f"the deepspeed engine gives the optimiser slices of the parameters, but {type(optimizer).__name__} "
                "needs whole ones; choose another optimizer.name, or the engine ddp or fsdp"
            )
        chosen = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._trained = {name: p for name, p in self.network.named_parameters() if p in chosen}
        self._engine, is_alone = self._initialized(settings)
        self._zero = self._engine.optimizer
        self._tell_scale()
        self._is_whole = False
        weakref.finalize(self, _forget, self._engine, is_alone)

    def _spread(self, settings: DeepSpeedSettings) -> None:
        self.lockstep, self.keeps_graphs = settings.stage == 3, settings.stage < 3
        for name, parameter in self.network.named_parameters():
            if parameter.dtype != torch.float32:
                raise DistapError(f"{name} is {parameter.dtype}, but the deepspeed engine needs float32 parameters")
        self._scalars = make_contiguous(self.network)  # DeepSpeed ignores strides, even of 1 x 1 kernels

    def _initialized(self, settings: DeepSpeedSettings) -> tuple[Any, bool]:
        """Return DeepSpeed's own engine, and whether a process group was made for it."""
        numel = sum(parameter.numel() for parameter in self._trained.values())
        config = merged_config(settings, self.world.size, numel, self._clip_norm)
        # Without these DeepSpeed searches for an accelerator, and complains if it finds a CPU.
        os.environ.setdefault("DS_ACCELERATOR", self.world.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        try:
            import deepspeed
        except ImportError as error:
            raise DistapError(f"engine: deepspeed is missing: pip install 'distap[deepspeed]' ({error})") from error
        if self.world.device.type == "cpu":
            # DeepSpeed would compile collectives for inference, which takes a minute and a compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        is_alone = self.world.size == 1 and not dist.is_initialized()
        if is_alone:  # DeepSpeed does not work without a process group
            backend = "nccl" if self.world.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        network, autocast = self.network, self._autocast

        def forward(images: Tensor) -> Tensor:  # holds no reference to this engine
            with autocast():  # DeepSpeed leaves any around it
                return network(images)

        try:
            wrapped = ReplacedForward(network, forward)
            with self.world.collective("set-up of DeepSpeed"):
                parts = {"model": wrapped, "optimizer": self._optimizer, "config": config}
                engine, *_ = deepspeed.initialize(**parts, dist_init_required=False)
        except (ValueError, TypeError, AssertionError, NotImplementedError, deepspeed.DeepSpeedConfigError) as error:
            if is_alone:
                dist.destroy_process_group()
            raise DistapError(
                f"{settings.config or 'engine'}: DeepSpeed {deepspeed.__version__} refuses its configuration: {error}"
            ) from error
        if self.world.rank == 0:
            zero = engine._config.zero_config.model_dump(mode="json", exclude_none=True, by_alias=True)
            told = json.dumps(config | {"zero_optimization": zero}, sort_keys=True)
            logger.info("DeepSpeed %s: %s", deepspeed.__version__, told)
        return engine, is_alone

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Enclose forward passes of one rank alone: stage 3 gathers all parameters for them."""
        if not self.lockstep or self._is_whole:
            yield
            return
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(self.network.parameters()))
        with self.world.collective("all_gather of the parameters"):
            gathered.__enter__()
        self._is_whole = True
        # DeepSpeed's hooks would gather, release and compare notes with other ranks in every forward pass.
        offload = self._zero.parameter_offload
        coordinator, offload.param_coordinator = offload.param_coordinator, _NothingToFetch()
        try:
            yield
        finally:
            offload.param_coordinator = coordinator
            self._is_whole = False
            gathered.__exit__(None, None, None)

    def describe(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(images)

    def forward(self, images: Tensor) -> Tensor:
        with self._sharing("all_gather of parameters in a forward pass"):
            return self._engine(images)

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        # These two lines are the entrance of DeepSpeed's own context. An open context would also reduce at its exit
        # if this rank fails, when no other rank does.
        self._engine.inside_no_sync_ctxt = self._zero._coalesce_grad_reduction = True
        yield
        if is_last:
            self._engine.inside_no_sync_ctxt = self._zero._coalesce_grad_reduction = False
            started = time.perf_counter()
            with self.world.collective("reduction of the gradients"), self._engine.coalesce_grad_reduction():
                pass
            self.reduce_seconds += time.perf_counter() - started

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        # DeepSpeed wants a loss, and averages over ranks.
        loss = (descriptors * gradient).sum() * self.world.size
        with self._sharing("all_gather of parameters in a backward pass"):
            self._engine.backward(loss)

    def update(self, learning_rate: float | None) -> float:
        set_rates(self._zero, learning_rate)
        self._engine.set_gradient_accumulation_boundary(True)
        with self.world.collective("update of the parameters"):
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        is_finite = norm < float("inf")  # False for NaN as well
        if is_finite:
            self._follow()
        self._scale.update(is_finite)
        self._tell_scale()
        return norm

    def discard(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None  # stage 3 does not clear these on a CPU
        self._zero.zero_grad()
        while self._zero._backward_active_depth:  # left over from a backward pass that failed
            self._zero.exit_backward()
        if not self.lockstep:  # otherwise an offloaded gradient would be added to the next one
            self._zero.micro_step_id = -1

    def state_dict(self) -> dict[str, Tensor]:
        with self.describing():
            state = {f"network.{name}": tensor.detach() for name, tensor in self.network.state_dict().items()}
            if self.lockstep:
                state = {name: tensor.clone() for name, tensor in state.items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        with self.world.collective("gathering of the optimizer's state"):
            state |= zero_state(self._zero, self._trained)
        for name in self._scalars:
            whole = (f"network.{name}", f"ema.{name}")
            of_scalar = [key for key in state if key in whole or key.startswith(f"{PREFIX}{name}.")]
            state |= {key: state[key].reshape(()) for key in of_scalar}
        return state | self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self.world.collective("distribution of the parameters"):
            load_zero_state(self._zero, self.network, self._trained, state, self._scalars)
        self._load_average(state)
        self._scale.load_state_dict(state)
        self._tell_scale()

    def _tell_scale(self) -> None:
        """Pass on the loss scale: DeepSpeed multiplies by it, and divides by it before clipping."""
        if self._scale.precision == "fp16":
            self._zero.override_loss_scale(self._scale.scale)

    def _sharing(self, name: str) -> AbstractContextManager[None]:
        """Enclose communication that only stage 3 has."""
        return self.world.collective(name) if self.lockstep else nullcontext()


class _NothingToFetch:
    """Replaces DeepSpeed's coordinator of parameters while all of them are present."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


def _forget(engine: Any, is_alone: bool) -> None:
    """Clear DeepSpeed's global references to an engine, so that the process group and its threads can end."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
    from deepspeed.utils import groups

    if dist.is_initialized():  # DeepSpeed asks for the rank
        engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    # An unbounded cache with coordinators and modules as its keys.
    remembers = inspect.getclosurevars(coordinator._PartitionedParameterCoordinator__params_to_release)
    remembers.nonlocals["func"].cache_clear()
    groups._release_process_group_references()
    if is_alone and dist.is_initialized():
        dist.destroy_process_group()
