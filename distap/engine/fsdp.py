"""FSDP2 (`fully_shard`): parameters, gradients and the optimiser's state are shared out among the ranks.

A step gathers the parameters once, before its first description, and reduces their gradients once, in its last
backward pass, whatever the number of micro-batches between. Where that is too much memory, they are gathered and
reduced with every micro-batch instead.
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

from distap.engine.precision import Precision
from distap.engine.protocol import BuildOptimizer
from distap.engine.updating import Updater, network_tensors, sharded_like
from distap.errors import DistapError
from distap.world import World

SMALLEST_UNIT = 0.01  # of the parameters: what is less is not worth a message of its own


@dataclass(frozen=True)
class FSDPSettings:
    """FSDP2.

    Args:
        units: what is gathered and reduced at once. `network` takes the fewest messages, one of each kind a step;
            with `blocks`, those of a block travel while the next one computes. None chooses `blocks` for `reshard`.
        reshard: whether a block's parameters are whole in stage three only while it computes, at the price of
            messages in every micro-batch. For networks whose parameters and gradients leave too little room; in
            stage one, which has neither gradients nor graphs, they are whole all the same.
    """

    name: Literal["fsdp"] = "fsdp"
    units: Literal["network", "blocks"] | None = None
    reshard: bool = False

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.reshard and self.units == "network":
            raise ValueError("reshard frees a unit while others compute, so it needs units: blocks")


class FSDPEngine:
    """A share of every parameter on each rank; the whole of them during a step, or of a block while it computes.

    A world of one has nothing to share out, so there the network is left as it is.

    Args:
        network: on its device already; its parameters and buffers are taken from rank 0.
        build_optimizer: gives the optimiser over the network's parameters; a group's `factor` multiplies its rate.
        world: the ranks.
        settings: of this engine.
        clip_norm: the gradient's norm is clipped to it; None leaves it alone.
        precision: what the network computes in.
    Raises:
        DistapError: trained parameters are of several dtypes.
    """

    def __init__(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        settings: FSDPSettings | None = None,
        clip_norm: float | None = None,
        precision: Precision | None = None,
    ) -> None:
        settings = settings or FSDPSettings()
        self.network = network
        self.lockstep = settings.reshard and world.size > 1
        self.keeps_graphs = not self.lockstep
        self._world = world
        self._precision = precision or Precision()
        self._reductions = _Reductions()
        self._reduces = False  # in the backward that comes next
        self._units: list[FSDPModule] = []  # the whole network is the last of them
        self._scalars: set[str] = set()
        if world.size > 1:
            self._scalars = _make_shardable(network)
            with world.collective("broadcast of the parameters"):
                _take_from_first(network, world)
            by_block = settings.reshard if settings.units is None else settings.units == "blocks"
            self._units = _shard([*(blocks(network) if by_block else ()), network], world, self._reductions)
            self._set_reshard(settings.reshard)
        self._updater = Updater(network, build_optimizer(), clip_norm, self._precision.scaler())

    @property
    def reductions(self) -> int:
        """Reductions of parameters' gradients so far, one for each unit in a step."""
        return self._reductions.count

    @property
    def reduce_seconds(self) -> float:
        """Seconds that this rank waited for them, and for parameters to be gathered; on a GPU, of the host alone."""
        return self._reductions.seconds

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Gathers the parameters, once; they stay until the last backward pass, unless they are freed each time."""
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

    def describe(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, without a graph."""
        with torch.no_grad():
            return self._described(images)

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, with a graph."""
        with self._world.collective("forward pass") if self.lockstep else nullcontext():
            return self._described(images)

    def _described(self, images: Tensor) -> Tensor:
        with self._precision.autocast():
            descriptors: Tensor = self.network(images)
        return descriptors

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Encloses forward and backward; the last one reduces, or every one where parameters are freed each time."""
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
        """Add the parameter gradients that dL/d descriptors leads to; on the last micro-batch, reduce them."""
        with self._world.collective("reduction of the gradients") if self._reduces else nullcontext():
            try:
                torch.autograd.backward(descriptors, self._updater.scaled(gradient))
            except RuntimeError:
                self._leave_backward()
                raise

    def update(self, learning_rate: float) -> float:
        """One optimiser step along the summed gradient, unless it is not finite; returns its norm."""
        with self._world.collective("norm of the gradient"):
            return self._updater.update(learning_rate)

    def discard(self) -> None:
        """Forget the gradients."""
        for parameter in self.network.parameters():  # whole ones, beside the shards that the optimiser knows
            parameter.grad = None
        self._updater.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """Network and optimiser by the names of their parameters, this rank's shards of them."""
        self._reshard()
        network = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        state = network | self._updater.state_dict()
        of_scalars = {name for name, tensor in state.items() if self._is_of_scalar(name, tensor)}
        with self._world.collective("all_gather of scalars"):
            return {name: _scalar(tensor) if name in of_scalars else tensor for name, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` of any engine gave; whole tensors are the same on every rank."""
        self._reshard()
        present = self.network.state_dict()
        given = network_tensors(state)
        self.network.load_state_dict({name: sharded_like(present.get(name), given[name]) for name in given})
        self._updater.load_state_dict(state)

    def _is_of_scalar(self, name: str, tensor: Tensor) -> bool:
        named = name.removeprefix("network.").removeprefix("optimizer.state.")
        is_its_own = named in self._scalars or named.rpartition(".")[0] in self._scalars
        return is_its_own and isinstance(tensor, DTensor)

    def _gather(self) -> None:
        """Make the parameters whole, where they are not: the next unit travels while one is put in place."""
        if not any(isinstance(parameter, DTensor) for parameter in self.network.parameters()):
            return
        started = time.perf_counter()
        with self._world.collective("all_gather of the parameters"):
            arriving: list[Any] = []
            for unit in self._units:
                arriving.append(unit.unshard(async_op=True))
                if len(arriving) > 1:
                    arriving.pop(0).wait()
            arriving.pop().wait()
        self._reductions.seconds += time.perf_counter() - started

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _set_reshard(self, reshards: bool) -> None:
        """Whether a unit is freed behind each of its passes; the network itself stays between its two."""
        for unit in self._units:
            unit.set_reshard_after_forward(reshards and unit is not self._units[-1], recurse=False)
            unit.set_reshard_after_backward(reshards, recurse=False)
            # A unit that is still whole has nothing to fetch; one that fetches ahead may fetch what is done with.
            unit.set_modules_to_backward_prefetch([] if reshards else [unit])

    def _leave_backward(self) -> None:
        """After a pass that failed within, such as for want of memory: the next one is a pass like any other.

        torch does so in a callback that a failed pass does not come to; its own way back, reset_iter_state, would
        make the other ranks wait for this one to gather.
        """
        if self._units and not self._reduces:
            state = self._units[-1]._get_fsdp_state()
            if state._state_ctx.post_backward_final_callback_queued:
                state._root_post_backward_final_callback()


def blocks(network: nn.Module) -> list[nn.Module]:
    """Parts of a network that are called one by one, as residual blocks are: members of its lists of modules.

    Those with less than a hundredth of the parameters are left to the whole.
    """
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


def _make_shardable(network: nn.Module) -> set[str]:
    """Give parameters a first dimension and their memory its order; returns the names of those that had none."""
    trained = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
    if len(trained) > 1:
        raise DistapError(f"trained parameters are {', '.join(map(str, trained))}; FSDP reduces those of one dtype")
    scalars = set()
    for path, module in network.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                scalars.add(f"{path}.{name}" if path else name)
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
            else:  # convolutions of a network that is channels-last
                parameter.data = parameter.data.contiguous()
    return scalars


def _take_from_first(network: nn.Module, world: World) -> None:
    for tensor in [*network.parameters(), *network.buffers()]:
        dist.broadcast(tensor.data, group=world.group, group_src=0)


def _shard(modules: Sequence[nn.Module], world: World, reductions: "_Reductions") -> list[FSDPModule]:
    """Each module with the parameters that are in none of those before it."""
    group = world.group or dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, world.device.type)
    units = []
    for module in modules:
        unit = fully_shard(module, mesh=mesh)
        # The loss is a mean over all ranks' queries already.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        module.register_forward_pre_hook(_keep_layout)
        unit.set_custom_reduce_scatter(reductions)  # type: ignore[arg-type]  # torch does not export its base class
        units.append(unit)
    return units


def _keep_layout(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of a unit as they were before torch took a view of them, in passes with a graph only.

    A view of a single image that is channels-last no longer counts as such, so convolutions would go on in another
    layout, and dropout, which draws in the order of memory, would drop something else than in stage one.
    """
    return tuple(
        one.clone(memory_format=torch.channels_last) if isinstance(one, Tensor) and _has_lost_layout(one) else one
        for one in inputs
    )


def _has_lost_layout(tensor: Tensor) -> bool:
    is_single = tensor.ndim == 4 and len(tensor) == 1 and tensor.stride(0) != tensor.numel()
    return is_single and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _scalar(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.reshape(())


class _Reductions:
    """torch's way of reducing, counted and timed; knows nothing of the engine, which it shall not keep alive."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        started = time.perf_counter()
        self.count += 1
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        self.seconds += time.perf_counter() - started
        return work
