"""A network of a loop of one's own, whoever wrapped it, as the three stages use it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distap.engine.base import Replica
from distap.errors import DistapError
from distap.ranking.loss import Gathered
from distap.ranking.rank import Ranking
from distap.stages.micro_batches import is_out_of_memory
from distap.world import World


class AnyNetwork(Replica):
    """The caller's network as the three stages use it.

    Gradients of micro-batches are summed beside the parameters, where no hook of a wrapper sees them, and given to
    autograd once, as if the whole batch had been one pass.
    """

    reduces_in_backward = False

    def __init__(
        self, network: nn.Module, trained: list[nn.Parameter], world: World, normalise: bool, syncs: bool, sums: bool
    ) -> None:
        self.network = network
        self._trained = trained
        self._gradients: list[Tensor | None] = [None] * len(trained)
        self._world, self._normalise, self._syncs = world, normalise, syncs
        self._reduces = sums and syncs and world.size > 1
        # DistributedDataParallel, FSDP and Horovod average over the ranks.
        self.scale = 1.0 if self._reduces else float(world.size)
        self._batchnorms = [module for module in self.network.modules() if isinstance(module, _BatchNorm)]
        kind = world.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._width = 0  # of a descriptor; a network with another loss puts that behind it

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The tensors to which autograd hands what `gradients` returns."""
        return self._trained

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Set BatchNorm layers to evaluation mode for a while."""
        trains = [module for module in self._batchnorms if module.training]
        for module in trains:
            module.training = False
        try:
            yield
        finally:
            for module in trains:
                module.training = True

    def forward(self, images: Any) -> Tensor:
        kind, dtype, is_enabled = self._autocast
        # Without a cache: one that was filled without a graph would lose the parameters' gradients.
        with torch.autocast(kind, dtype, is_enabled, cache_enabled=False):
            output = self.network(images)
        descriptors, *others = output if isinstance(output, tuple) else (output,)
        descriptors = descriptors.to(torch.promote_types(descriptors.dtype, torch.float32))
        if self._normalise:
            descriptors = normalize(descriptors)
        self._width = descriptors.shape[1]
        return torch.cat([descriptors, *(other[:, None].to(descriptors) for other in others)], dim=1)

    def without_other(self, rows: Tensor) -> Tensor:
        """The descriptors; one whose other loss is not finite is not finite either, so that it is left out."""
        return rows[:, : self._width] + 0 * rows[:, self._width :].sum(1, keepdim=True)

    def with_other(self, ranking: Ranking, gathered: Gathered, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the batch, other losses included, and its gradient by what `forward` gives."""
        if rows.shape[1] == self._width:
            return ranking.loss.to(rows.dtype), ranking.gradient
        taking_part = gathered.local[:, None].to(rows) / len(gathered.images)
        others = taking_part.expand(-1, rows.shape[1] - self._width)
        mean = self._world.sum((others * torch.where(others > 0, rows[:, self._width :], 0)).sum())
        return (ranking.loss + mean).to(rows.dtype), torch.cat([ranking.gradient, others], dim=1)

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        found = torch.autograd.grad(descriptors, self._trained, gradient, allow_unused=True)
        pairs = list(zip(self._gradients, found, strict=True))
        both = [(old, new) for old, new in pairs if old is not None and new is not None]
        if both:
            torch._foreach_add_([old for old, _ in both], [new for _, new in both])
        # A copy to add to: autograd may give one tensor to several parameters, or one that repeats a number.
        self._gradients = [new.clone() if old is None and new is not None else old for old, new in pairs]

    def discard(self) -> None:
        self._gradients = [None] * len(self._trained)

    def gradients(self) -> Sequence[Tensor | None]:
        """The gradient for each of `inputs`."""
        if not self._reduces:
            return self._gradients
        pairs = zip(self._gradients, self._trained, strict=True)
        wholes = [torch.zeros_like(parameter) if one is None else one for one, parameter in pairs]
        flat = self._world.sum(torch.cat([whole.flatten() for whole in wholes]))
        parts = flat.split([whole.numel() for whole in wholes])
        return [part.view_as(whole) for part, whole in zip(parts, wholes, strict=True)]


class AnyShardedNetwork(AnyNetwork):
    """A network under FSDP2, whose parameters come and go with every micro-batch, on all ranks together."""

    lockstep, keeps_graphs = True, False

    @property
    def inputs(self) -> Sequence[Tensor]:
        return [torch.zeros((), device=self._world.device, requires_grad=True)]  # FSDP gives its shards theirs

    def describe(self, images: Any) -> Tensor:
        try:
            return super().describe(images)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DistapError("out of memory, and ranks under FSDP cannot go on alone: lower micro_batch") from error

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(is_last and self._syncs)
        self.network.set_is_last_backward(is_last)
        try:
            yield
        finally:
            self.network.set_requires_gradient_sync(True)
            self.network.set_is_last_backward(True)

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        torch.autograd.backward(descriptors, gradient)

    def gradients(self) -> Sequence[Tensor | None]:
        return [None]


def world_of(network: nn.Module, group: dist.ProcessGroup | None) -> World:
    """The ranks of a batch: `group`, those over which the network's wrapper averages gradients, or all."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=device)
    group = group or _group_of(network)
    return World(dist.get_rank(group), dist.get_world_size(group), device=device, group=group)


def _group_of(network: nn.Module) -> dist.ProcessGroup | None:
    if isinstance(network, DistributedDataParallel):
        return network.process_group
    sharded = next((one for one in network.parameters() if isinstance(one, DTensor)), None)
    return None if sharded is None or sharded.device_mesh.ndim > 1 else sharded.device_mesh.get_group()


def refuse_unusable(network: nn.Module, freezes_batchnorm: bool) -> None:
    """Raise a DistapError that names a part of an unwrapped network with which the gradient would be wrong."""
    for name, module in network.named_modules():
        if name and isinstance(module, FSDPModule) and not isinstance(network, FSDPModule):
            raise DistapError(
                f"{name} is sharded by fully_shard, but not the whole network; call fully_shard on it too"
            )
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise DistapError(
                f"{name or 'the network'} is wrapped by {type(module).__name__}; wrap the whole network by "
                "DistributedDataParallel or fully_shard"
            )
        if not isinstance(module, _BatchNorm):
            continue
        if module.running_mean is None:
            raise DistapError(f"{name} is a BatchNorm layer without running statistics, which mixes images")
        if module.training and not freezes_batchnorm:
            raise DistapError(
                f"{name} is a BatchNorm layer in training mode, so a descriptor would depend on its micro-batch; "
                "pass freeze_batchnorm=True, or set it to evaluation mode (module.eval())"
            )
