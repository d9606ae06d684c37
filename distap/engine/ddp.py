"""DistributedDataParallel: each rank holds the whole network; gradients are all-reduced once a step."""

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from distap.engine.precision import Precision
from distap.engine.protocol import BuildOptimizer
from distap.engine.updating import Updater, network_tensors
from distap.world import World

# Buffers are frozen, or each rank's own. torch 2.15 renames the option that says so.
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


@dataclass(frozen=True)
class DDPSettings:
    """DistributedDataParallel.

    Args:
        bucket_megabytes: gradients are all-reduced in parts of about this size, each as soon as the last backward
            pass has it; None reduces them at once, which is the fewest messages, behind that pass.
    """

    name: Literal["ddp"] = "ddp"
    bucket_megabytes: float | None = None

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.bucket_megabytes is not None and self.bucket_megabytes <= 0:
            raise ValueError(f"bucket_megabytes is {self.bucket_megabytes}; expected more than 0")


class DDPEngine:
    """One whole copy of the network a rank, one all-reduce a step.

    Args:
        network: on its device already, its parameters the same on every rank or to be taken from rank 0.
        build_optimizer: gives the optimiser over the network's parameters; a group's `factor` multiplies its rate.
        world: the ranks.
        settings: of this engine.
        clip_norm: the gradient's norm is clipped to it; None leaves it alone.
        precision: what the network computes in.
    """

    lockstep, keeps_graphs = False, True

    def __init__(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        settings: DDPSettings | None = None,
        clip_norm: float | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.network = network
        self._world = world
        self._precision = precision or Precision()
        self._updater = Updater(network, build_optimizer(), clip_norm, self._precision.scaler())
        self._reductions = _Reductions(world.group)
        self._reduce_seconds = 0.0
        self._reduces = False  # in the backward that comes next
        self._replicas: DistributedDataParallel | None = None
        if world.size > 1:
            # Room for all of them is one bucket, so one all-reduce.
            megabytes = (settings or DDPSettings()).bucket_megabytes or _megabytes(network) + 1
            with world.collective("broadcast of the parameters"):
                self._replicas = DistributedDataParallel(
                    _Announced(network),
                    process_group=world.group,
                    bucket_cap_mb=megabytes,
                    gradient_as_bucket_view=True,
                    **_NO_BUFFER_SYNC,
                )
            self._replicas.register_comm_hook(None, self._reductions.sum_over_ranks)

    @property
    def reductions(self) -> int:
        """All-reduces of parameters' gradients so far."""
        return self._reductions.count

    @property
    def reduce_seconds(self) -> float:
        """Seconds that backward passes waited for them so far."""
        return self._reduce_seconds

    def describing(self) -> AbstractContextManager[None]:
        """Nothing to do: parameters are always whole."""
        return nullcontext()

    def describe(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, without a graph."""
        with torch.no_grad():
            return self.forward(images)

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, with a graph."""
        with self._precision.autocast():
            descriptors: Tensor = self.network(images)
        return descriptors

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Encloses the backward passes; the last one reduces."""
        self._reduces = is_last and self._replicas is not None
        try:
            yield
        finally:
            self._reduces = False

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that dL/d descriptors leads to; on the last micro-batch, reduce them."""
        gradient = self._updater.scaled(gradient)
        if not self._reduces or self._replicas is None:
            torch.autograd.backward(descriptors, gradient)
            return
        with self._world.collective("all_reduce of the gradients"):
            torch.autograd.backward(self._replicas(descriptors), gradient)
        # All gradients were there when the last reduction began.
        self._reduce_seconds += time.perf_counter() - self._reductions.last_started

    def update(self, learning_rate: float) -> float:
        """One optimiser step along the summed gradient, unless it is not finite; returns its norm."""
        return self._updater.update(learning_rate)

    def discard(self) -> None:
        """Forget the gradients."""
        self._updater.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """Network and optimiser by the names of their parameters, the same on every rank."""
        network = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        return network | self._updater.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` of any engine gave."""
        self.network.load_state_dict(network_tensors(state))
        self._updater.load_state_dict(state)


class _Announced(nn.Module):
    """What DDP wraps. It reduces in the backward pass that follows a forward pass through it, and no other.

    So only the descriptors of the last micro-batch go through it, whose graph may be one that was kept since
    stage one: a forward pass of the network through DDP would have to be the last one before the backward pass.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, descriptors: Tensor) -> Tensor:
        return descriptors


class _Reductions:
    """DDP's communication hook, which counts the reductions.

    It knows nothing of the engine: DDP holds its hook where Python's garbage collector cannot look, so a way back
    to DDP would keep network and process group for ever, with threads that outlive the interpreter.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.count = 0
        self.last_started = 0.0

    def sum_over_ranks(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's reduction without its division by W: the loss is a mean over all ranks' queries already."""
        self.last_started = time.perf_counter()
        self.count += 1
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def _megabytes(network: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad) // 2**20
