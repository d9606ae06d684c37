"""FSDP2 (`fully_shard`): ranks share out parameters, gradients and the optimiser's state.

A step gathers the parameters once, before its first description, and reduces their gradients once, in its last
backward pass, whatever the number of micro-batches. With `reshard`, which needs less memory, every micro-batch
gathers and reduces.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from distap.engine.base import Engine, make_contiguous
from distap.errors import DistapError

SMALLEST_UNIT = 0.01  # share of the parameters; a smaller block is not worth messages of its own


@dataclass(frozen=True)
class FSDPSettings:
    """FSDP2."""

    # What is gathered and reduced together. `network` takes the fewest messages, one of each kind a step; with
    # `blocks`, the messages of one block overlap with the arithmetic of the next. None chooses by `reshard`.
    units: Literal["network", "blocks"] | None = None
    reshard: bool = False  # in stage three, keep a block's parameters only while it computes, to save memory

    def __post_init__(self) -> None:
        if self.reshard and self.units == "network":
            raise ValueError("reshard frees a unit while others compute, so it needs units: blocks")

    def build(self, *parts: Any, **more: Any) -> "FSDPEngine":
        return FSDPEngine(*parts, **more, settings=self)


class FSDPEngine(Engine):
    """A share of every parameter on each rank; a single rank keeps the network as it is."""

    def _spread(self, settings: FSDPSettings | None) -> None:
        settings, world = settings or FSDPSettings(), self.world
        self.lockstep = settings.reshard and world.size > 1
        self.keeps_graphs = not self.lockstep
        self._reduce_scatter = _ReduceScatter()
        self._units: list[FSDPModule] = []  # the last one is the whole network
        self._scalars: set[str] = set()
        if world.size == 1:
            return
        trained = {parameter.dtype for parameter in self.network.parameters() if parameter.requires_grad}
        if len(trained) > 1:
            raise DistapError(f"trained parameters are {', '.join(map(str, trained))}; FSDP reduces only one dtype")
        self._scalars = make_contiguous(self.network)
        with world.collective("broadcast of the parameters"):
            for tensor in (*self.network.parameters(), *self.network.buffers()):
                dist.broadcast(tensor.data, group=world.group, group_src=0)
        group = world.group or dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, world.device.type)
        by_block = settings.reshard if settings.units is None else settings.units == "blocks"
        # Each unit holds the parameters which no earlier one holds.
        for module in [*(blocks(self.network) if by_block else ()), self.network]:
            unit = fully_shard(module, mesh=mesh)
            # Sum over ranks: stage two has divided by the global number of queries already.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_reduce_scatter(self._reduce_scatter)
            module.register_forward_pre_hook(_keep_layout)
            self._units.append(unit)
        self._set_reshard(settings.reshard)

    @property
    def reduce_seconds(self) -> float:
        """Seconds of gathering and reducing so far; on a GPU only those of the host."""
        return self._reduce_scatter.seconds

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Gather the parameters. They stay until the last backward pass, except with `reshard`."""
        self._gather()
        if not self.lockstep:
            yield
            return
        self._set_reshard(False)
        try:
            yield
        finally:
            self._set_reshard(True)
            self._reshard()

    def forward(self, images: Tensor) -> Tensor:
        communicates = self.lockstep and torch.is_grad_enabled()
        with self.world.collective("forward pass") if communicates else nullcontext():
            return super().forward(images)

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        if not self._units:
            yield
            return
        self._reduces = is_last or self.lockstep
        if not self.lockstep:
            self._gather()
            self._units[-1].set_requires_gradient_sync(is_last)
            self._units[-1].set_is_last_backward(is_last)
        yield
        self._reduces = False
        if is_last:
            self._reshard()

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        with self.world.collective("reduction of the gradients") if self._reduces else nullcontext():
            try:
                torch.autograd.backward(descriptors, gradient * self._scale.scale)
            except RuntimeError:
                self._leave_backward()
                raise

    def update(self, learning_rate: float | None) -> float:
        with self.world.collective("norm of the gradient"):
            return super().update(learning_rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards, and parameters without dimensions whole."""
        self._reshard()
        state = super().state_dict()
        with self.world.collective("all_gather of scalars"):
            for name, tensor in state.items():
                named = name.removeprefix("network.").removeprefix("ema.").removeprefix("optimizer.state.")
                of_scalar = named in self._scalars or named.rpartition(".")[0] in self._scalars
                if of_scalar and isinstance(tensor, DTensor):
                    state[name] = tensor.full_tensor().reshape(())
        return state

    def _exchange(self) -> None:
        self._reshard()
        super()._exchange()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._reshard()
        super().load_state_dict(state)

    def _gather(self) -> None:
        """Make sharded parameters whole; one unit travels while the one before it is copied into place."""
        if not any(isinstance(parameter, DTensor) for parameter in self.network.parameters()):
            return
        started = time.perf_counter()
        with self.world.collective("all_gather of the parameters"):
            arriving: list[Any] = []
            for unit in self._units:
                arriving.append(unit.unshard(async_op=True))
                if len(arriving) > 1:
                    arriving.pop(0).wait()
            arriving.pop().wait()
        self._reduce_scatter.seconds += time.perf_counter() - started

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _set_reshard(self, reshards: bool) -> None:
        """Choose whether a unit is freed after each pass; the network itself stays between its two passes."""
        for unit in self._units:
            unit.set_reshard_after_forward(reshards and unit is not self._units[-1], recurse=False)
            unit.set_reshard_after_backward(reshards, recurse=False)
            # A unit that stays whole has nothing to prefetch; by default it might prefetch one that is done.
            unit.set_modules_to_backward_prefetch([] if reshards else [unit])

    def _leave_backward(self) -> None:
        """Reset FSDP's state after a backward pass that failed, in which torch's callback does not run.

        torch's own remedy, reset_iter_state, would make the other ranks wait for this one to gather.
        """
        if self._units and not self._reduces:
            state = self._units[-1]._get_fsdp_state()
            if state._state_ctx.post_backward_final_callback_queued:
                state._root_post_backward_final_callback()


def blocks(network: nn.Module) -> list[nn.Module]:
    """The larger parts that a network calls one by one, such as residual blocks: the members of its module lists."""
    enough = SMALLEST_UNIT * _count(network)
    return [block for block in _members(network) if _count(block) > enough]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    lists = (nn.Sequential, nn.ModuleList)
    for child in module.children():
        if isinstance(module, lists) and not isinstance(child, lists):
            yield child
        else:
            yield from _members(child)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _keep_layout(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Restore the memory layout of a unit's inputs, which FSDP replaces by views in passes with a graph.

    The view of a single channels-last image no longer counts as channels-last, and dropout, which draws in memory
    order, would drop other elements than in stage one.
    """

    def kept(one: Any) -> Any:
        if not isinstance(one, Tensor) or one.ndim != 4 or len(one) != 1 or one.stride(0) == one.numel():
            return one
        has_lost_it = one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous()
        return one.clone(memory_format=torch.channels_last) if has_lost_it else one

    return tuple(map(kept, inputs))


class _ReduceScatter:
    """torch's reduction, timed. It holds no reference to the engine, which it would keep alive."""

    seconds = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        started = time.perf_counter()
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        self.seconds += time.perf_counter() - started
        return work
