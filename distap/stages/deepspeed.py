"""DeepSpeed ZeRO: shard the optimiser's state, the gradients and the parameters over ranks.

Each rank sums its gradients over the micro-batches of a step, and the ranks reduce them once, after
the last one. On their own, stages 2 and 3 would reduce in every backward pass.
"""

import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.optim import Optimizer

from distap.errors import DistapError
from distap.stages.replica import ReplacedForward, Replica
from distap.world import World


class ZeroReplica(Replica):
    """A network under DeepSpeed; it must have the same parameters on every rank.

    Args:
        optimizer: optimiser of the network's parameters; DeepSpeed calls its step.
        config: DeepSpeed's configuration.
    """

    def __init__(
        self,
        network: nn.Module,
        world: World,
        forward: Callable[[Any], Tensor] | None = None,
        *,
        optimizer: Optimizer,
        config: dict[str, Any],
    ) -> None:
        super().__init__(network, world, forward)
        stage = config["zero_optimization"]["stage"]
        self.lockstep = stage == 3
        self.keeps_graphs = stage < 3
        # Before DeepSpeed replaces the parameters of the optimiser's groups by its flat partitions.
        chosen = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self.trained = {
            name: parameter for name, parameter in network.named_parameters() if parameter in chosen
        }
        self.engine, is_alone = self._initialized(optimizer, config)
        self.zero = self.engine.optimizer
        self._is_whole = False
        weakref.finalize(self, _forget, self.engine, is_alone)

    def _initialized(self, optimizer: Optimizer, config: dict[str, Any]) -> tuple[Any, bool]:
        """Return the engine, and whether a process group was made for it alone."""
        # Without these DeepSpeed searches for an accelerator, and complains if it finds a CPU.
        os.environ.setdefault("DS_ACCELERATOR", self.world.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        try:
            import deepspeed
        except ImportError as error:
            raise DistapError(
                "package.missing",
                f"engine: deepspeed is missing: pip install 'distap[deepspeed]' ({error})",
            ) from error
        if self.world.device.type == "cpu":
            # DeepSpeed would compile collectives for inference, which takes a minute and a
            # compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        is_alone = self.world.size == 1 and not dist.is_initialized()
        if is_alone:  # DeepSpeed does not work without a process group
            backend = "nccl" if self.world.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        with self.world.collective("set-up of DeepSpeed"):
            engine, *_ = deepspeed.initialize(
                model=ReplacedForward(self.network, self._forward),
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
            )
        return engine, is_alone

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Let this rank run forward passes alone; under ZeRO stage 3, hold all parameters."""
        if not self.lockstep or self._is_whole:
            yield
            return
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(self.network.parameters()))
        # Entered by hand, so that the watchdog times the message alone, and not the passes that
        # follow.
        with self.world.collective("all_gather of the parameters"):
            gathered.__enter__()
        self._is_whole = True
        # DeepSpeed's hooks would gather and release parameters, and so communicate, in every
        # forward pass.
        offload = self.zero.parameter_offload
        coordinator, offload.param_coordinator = offload.param_coordinator, _NothingToFetch()
        try:
            yield
        finally:
            offload.param_coordinator = coordinator
            self._is_whole = False
            gathered.__exit__(None, None, None)

    def forward(self, images: Tensor) -> Tensor:
        # parameters are whole: DeepSpeed's own forward would communicate
        if not torch.is_grad_enabled():
            return super().forward(images)
        with self._sharing("all_gather of parameters in a forward pass"):
            return self.engine(images)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        # These two lines are the entrance of DeepSpeed's own context. An open context would also
        # reduce at its exit if this rank fails, when no other rank does.
        self.engine.inside_no_sync_ctxt = self.zero._coalesce_grad_reduction = True
        try:
            yield
        finally:
            self.engine.inside_no_sync_ctxt = self.zero._coalesce_grad_reduction = False

    def backward(self, descriptors: Tensor, gradient: Tensor, is_last: bool) -> None:
        # DeepSpeed wants a loss, and averages over ranks.
        loss = (descriptors * gradient).sum() * self.world.size
        with self._sharing("all_gather of parameters in a backward pass"):
            self.engine.backward(loss)

    def reduce(self) -> None:
        self.engine.inside_no_sync_ctxt = self.zero._coalesce_grad_reduction = False
        with (
            self.world.collective("reduction of the gradients"),
            self.engine.coalesce_grad_reduction(),
        ):
            pass

    def discard(self) -> None:
        # DeepSpeed adds gradients up in buffers of its own, next to `.grad`: both are cleared.
        for parameter in self.trained.values():
            parameter.grad = None  # stage 3 does not clear these on a CPU
        self.zero.zero_grad()
        while self.zero._backward_active_depth:  # left over from a backward pass that failed
            self.zero.exit_backward()

    def _sharing(self, name: str) -> AbstractContextManager[None]:
        """Enclose an exchange of ZeRO stage 3; below it each rank has all parameters."""
        return self.world.collective(name) if self.lockstep else nullcontext()


class _NothingToFetch:
    """Replace DeepSpeed's coordinator of parameters while all parameters are present."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


def _forget(engine: Any, is_alone: bool) -> None:
    # DeepSpeed holds engines in module globals; with them the process group and its threads would
    # never end.
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
    from deepspeed.utils import groups

    if dist.is_initialized():  # DeepSpeed asks for the rank
        engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    # An unbounded cache with coordinators and modules as its keys.
    remembers = inspect.getclosurevars(
        coordinator._PartitionedParameterCoordinator__params_to_release
    )
    remembers.nonlocals["func"].cache_clear()
    groups._release_process_group_references()
    if is_alone and dist.is_initialized():
        dist.destroy_process_group()
