"""DistributedDataParallel: each rank holds the whole network, and gradients are all-reduced once a step."""

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import PositiveFloat
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from distap.engine.base import Engine, ReplacedForward

# Buffers are frozen, or each rank has its own. torch 2.15 renames the option that turns their broadcast off.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


@dataclass(frozen=True)
class DDPSettings:
    """DistributedDataParallel."""

    # All-reduce gradients in parts of about this size, each as soon as the last backward pass has computed it; None
    # reduces all of them in one message after that pass.
    bucket_megabytes: PositiveFloat | None = None

    def build(self, *parts: Any, **more: Any) -> "DDPEngine":
        return DDPEngine(*parts, **more, settings=self)


class DDPEngine(Engine):
    """One whole copy of the network on each rank."""

    reduce_seconds = 0.0

    def _spread(self, settings: DDPSettings | None) -> None:
        self._sum = SumOverRanks(self.world.group)
        self._replicas: DistributedDataParallel | None = None
        if self.world.size == 1:
            return
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        megabytes = sum(p.numel() * p.element_size() for p in trained) // 2**20 + 1  # room for all in one bucket
        options: dict[str, Any] = {
            "bucket_cap_mb": (settings or DDPSettings()).bucket_megabytes or megabytes,
            "gradient_as_bucket_view": True,
            _BUFFER_SYNC: False,
        }
        with self.world.collective("broadcast of the parameters"):
            # DDP reduces only in a backward pass that follows a forward pass through it. The descriptors of the last
            # micro-batch pass through it unchanged, since their graph may be kept from stage one.
            module = ReplacedForward(self.network, lambda descriptors: descriptors)
            self._replicas = DistributedDataParallel(module, process_group=self.world.group, **options)
        self._replicas.register_comm_hook(None, self._sum.all_reduce)

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        self._reduces = is_last and self._replicas is not None
        try:
            yield
        finally:
            self._reduces = False

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        gradient = gradient * self._scale.scale
        if not self._reduces or self._replicas is None:
            torch.autograd.backward(descriptors, gradient)
            return
        with self.world.collective("all_reduce of the gradients"):
            torch.autograd.backward(self._replicas(descriptors), gradient)
        # When the last all-reduce started, this rank had computed all its gradients.
        self.reduce_seconds += time.perf_counter() - self._sum.last_started


@dataclass
class SumOverRanks:
    """DDP's communication hook, without DDP's division by W.

    It holds no reference to the engine: Python's garbage collector does not see DDP's hook, nor a cycle through it.
    """

    group: dist.ProcessGroup | None
    last_started: float = 0.0

    def all_reduce(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.last_started = time.perf_counter()
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
