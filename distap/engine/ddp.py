"""DistributedDataParallel: each rank holds the whole network; gradients are all-reduced once a step."""

import inspect
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distap.distributed import World

# Buffers are frozen, or each rank's own. torch 2.15 renames the option that says so.
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


class DDPEngine:
    """One whole copy of the network a rank, one all-reduce a step.

    Args:
        network: on its device already, its parameters the same on every rank or to be taken from rank 0.
        optimizer: over the network's parameters; a group's `factor` multiplies its learning rate.
        world: the ranks.
        clip_norm: the gradient's norm is clipped to it; None leaves it alone.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, world: World, clip_norm: float | None = None
    ) -> None:
        self.network = network
        self._world = world
        self._reduces = world.size > 1  # in the backward that comes next
        self._reductions = _Reductions()
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._replicas: DistributedDataParallel | None = None
        if world.size > 1:
            with world.collective("broadcast of the parameters"):
                self._replicas = DistributedDataParallel(
                    network,
                    device_ids=[world.device] if world.device.type == "cuda" else None,
                    **_NO_BUFFER_SYNC,
                    bucket_cap_mb=_megabytes(network) + 1,  # one bucket, so one all-reduce
                    gradient_as_bucket_view=True,
                )
            self._replicas.register_comm_hook(None, self._reductions.sum_over_ranks)

    @property
    def reductions(self) -> int:
        """All-reduces of parameters' gradients so far."""
        return self._reductions.count

    @property
    def reduce_seconds(self) -> float:
        """Seconds spent in them so far."""
        return self._reductions.seconds

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward: around backward alone, DDP would all-reduce every micro-batch."""
        self._reduces = is_last and self._replicas is not None
        if self._replicas is None or is_last:
            return nullcontext()
        skipping: AbstractContextManager[None] = self._replicas.no_sync()
        return skipping

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, with a graph."""
        descriptors: Tensor = (self._replicas or self.network)(images)
        return descriptors

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that dL/d descriptors leads to; on the last micro-batch, reduce them."""
        with self._world.collective("all_reduce of the gradients") if self._reduces else nullcontext():
            torch.autograd.backward(descriptors, gradient)

    def update(self, learning_rate: float) -> float:
        """One optimiser step along the summed gradient, unless it is not finite; returns its norm."""
        bound = float("inf") if self._clip_norm is None else self._clip_norm
        norm = float(nn.utils.clip_grad_norm_(self.network.parameters(), bound))
        if norm < float("inf"):  # False for NaN as well
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * group.get("factor", 1.0)
            self._optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Network and optimiser by the names of their parameters, the same on every rank."""
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self._optimizer.state:  # none before the first update
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            optimizer: dict[str, Any] = dict(get_optimizer_state_dict(self.network, self._optimizer, options=options))
            # Its settings are the recipe's, and the rate is given with every update.
            state |= {f"optimizer.{name}": value for name, value in optimizer.items() if isinstance(value, Tensor)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` of any engine gave."""
        parts: dict[str, dict[str, Any]] = {"network": {}, "optimizer": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.network.load_state_dict(parts["network"])
        if parts["optimizer"]:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            settings = get_optimizer_state_dict(self.network, self._optimizer, options=options)
            set_optimizer_state_dict(self.network, self._optimizer, settings | parts["optimizer"], options=options)


class _Reductions:
    """DDP's communication hook, which counts and times the reductions.

    It knows nothing of the engine: DDP holds its hook where Python's garbage collector cannot look, so a way back
    to DDP would keep network and process group for ever, with threads that outlive the interpreter.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def sum_over_ranks(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's reduction without its division by W: the loss is a mean over all ranks' queries already."""
        started = time.perf_counter()
        self.count += 1
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def reduced(future: torch.futures.Future[Any]) -> Tensor:
            self.seconds += time.perf_counter() - started
            return future.value()[0]  # type: ignore[no-any-return]

        return work.get_future().then(reduced)


def _megabytes(network: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad) // 2**20
