"""FSDP2 (`fully_shard`): shard parameters, gradients and the optimiser's state over ranks.

A step gathers the parameters once, before its first description, and reduces their gradients once,
in its last backward pass, whatever the number of micro-batches:

    describe                replay                          update
    gather |  d  d  d  d  | d b  d b  d b  d b -> reduce  | free
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from distap.errors import DistapError
from distap.stages.replica import Replica
from distap.world import World


class FSDPReplica(Replica):
    """A network after `fully_shard`, by `shard` or by the caller.

    Args:
        frees: free the parameters between describe and replay, where the caller may do as they
            like.
        syncs: reduce gradients in the last backward pass; otherwise FSDP keeps them for a later
            one.
    """

    survives_backward = False

    def __init__(
        self,
        network: nn.Module,
        world: World,
        forward: Callable[[Any], Tensor] | None = None,
        *,
        frees: bool = False,
        syncs: bool = True,
    ) -> None:
        super().__init__(network, world, forward)
        self.keeps_graphs = not frees
        self._syncs = syncs
        # FSDP itself gives every shard its gradient. But autograd calls replay only if it has an
        # input that requires a gradient, so this one stands in.
        self.inputs: list[Tensor] = [torch.zeros((), device=self.world.device, requires_grad=True)]
        self.gradients: list[Tensor | None] = [None]
        inner = [module for module in self.network.modules() if isinstance(module, FSDPModule)]
        self._units = [*inner[1:], inner[0]]  # the last one is the whole network

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Gather all parameters; unless `frees`, keep them until the end of the next replay."""
        # Otherwise FSDP would free a unit after each micro-batch and gather it again before the
        # next one.
        self._gather()
        try:
            yield
        finally:
            if not self.keeps_graphs:
                self.release()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self._gather()
        try:
            yield
        except BaseException:
            self.discard()  # of whole parameters too, which `release` would hide
            raise
        finally:
            self.release()
            self._units[-1].set_requires_gradient_sync(True)  # as the caller's own passes expect it

    def backward(self, descriptors: Tensor, gradient: Tensor, is_last: bool) -> None:
        # Without synchronisation FSDP adds whole gradients up; the last pass reduces the sum.
        reduces = is_last and self._syncs
        root = self._units[-1]
        root.set_requires_gradient_sync(reduces)
        root.set_is_last_backward(is_last)
        with self.world.collective("reduction of the gradients") if reduces else nullcontext():
            super().backward(descriptors, gradient, is_last)

    def reduce(self) -> None:
        """Do nothing: the last backward pass has reduced the gradients."""

    def release(self) -> None:
        """Free all parameters but this rank's shards."""
        self._stay_whole(False)
        for unit in self._units:
            unit.reshard()

    def _gather(self) -> None:
        self._stay_whole(True)
        if not any(isinstance(parameter, DTensor) for parameter in self.network.parameters()):
            return
        # All units by hand and in one order. FSDP would gather each when it is used, and ranks with
        # other numbers of micro-batches would then wait for each other for ever.
        with self.world.collective("all_gather of the parameters"):
            for unit in self._units:
                unit.unshard()

    def _stay_whole(self, stays: bool) -> None:
        # The network itself, the last unit, is whole between its forward and its backward pass in
        # any case: gathering it again at once would only cost a message.
        for unit in self._units:
            unit.set_reshard_after_forward(not stays and unit is not self._units[-1], recurse=False)
            unit.set_reshard_after_backward(not stays, recurse=False)
            # A unit that stays whole has nothing to prefetch; by default it might prefetch one that
            # is done.
            unit.set_modules_to_backward_prefetch([unit] if stays else [])


def shard(network: nn.Module, world: World) -> None:
    """Shard a network, which has the same parameters on every rank.

    The whole network is one unit, which takes the fewest messages. Gradients are summed over the
    ranks.
    """
    trained = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
    if len(trained) > 1:
        raise DistapError(
            "engine.several_dtypes",
            f"trained parameters are {', '.join(map(str, trained))}; FSDP reduces only one dtype",
        )
    make_contiguous(network)
    group = world.group or dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, world.device.type)
    unit = fully_shard(network, mesh=mesh)
    # Stage two has divided by the global number of queries: gradients are summed, where FSDP would
    # average.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def make_contiguous(network: nn.Module) -> None:
    """Make every parameter contiguous, and one without dimensions a vector of one number."""
    for parameter in network.parameters():
        parameter.data = parameter.data.reshape(-1).view(parameter.shape or 1)
