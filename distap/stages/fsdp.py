"""FSDP2 (`fully_shard`): shard parameters, gradients and the optimiser's state over ranks.

With `reshard: step` a step gathers the parameters once, before its first description, and reduces
their gradients once, in its last backward pass, whatever the number of micro-batches:

    describe                replay                          update
    gather |  d  d  d  d  | d b  d b  d b  d b -> reduce  | free

With `reshard: pass` each pass (d, b) gathers a block when it comes to it and frees it behind it,
and each b reduces the gradients of a block. So a rank holds a block or two, and makes as many
passes as each other rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distap.errors import DistapError, logger
from distap.ranking.row_shards import mesh_of
from distap.stages.blocks import blocks_of, numel
from distap.stages.replica import Replica
from distap.world import World

Unit = Literal["auto", "network", "blocks"]
Gather = Literal["float32", "bf16"]
Reshard = Literal["step", "pass"]
Within = Literal["all", "host"]
LARGE = 10**9  # parameters from which `auto` gathers block by block


class FSDPReplica(Replica):
    """A network after `fully_shard`, by `shard` or by the caller.

    Args:
        frees: free the parameters between describe and replay, where the caller may do as they
            like.
        syncs: reduce gradients in the last backward pass; otherwise FSDP keeps them for a later
            one.
        reshard: free a block after each `pass` through it, or all after the `step`.
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
        reshard: Reshard = "step",
    ) -> None:
        super().__init__(network, world, forward)
        self.lockstep = self.describes_in_lockstep = reshard == "pass"
        self.keeps_graphs = not frees and not self.lockstep
        self._frees = frees
        self._syncs = syncs
        # FSDP itself gives every shard its gradient. But autograd calls replay only if it has an
        # input that requires a gradient, so this one stands in.
        self.inputs: list[Tensor] = [torch.zeros((), device=self.world.device, requires_grad=True)]
        self.gradients: list[Tensor | None] = [None]
        inner = [module for module in self.network.modules() if isinstance(module, FSDPModule)]
        self._units = [*inner[1:], inner[0]]  # the last one is the whole network
        self._before = [_Resharding(unit, is_root=unit is inner[0]) for unit in self._units]

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Gather all parameters; unless `frees`, keep them until the end of the next replay.

        With `reshard: pass`, FSDP gathers each block when it is used.
        """
        self._prepare()
        try:
            yield
        finally:
            if self._frees:
                self.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._gather()
        try:
            yield
        finally:
            if self._frees or self.lockstep:
                self.release()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self._prepare()
        try:
            yield
        except BaseException:
            self.discard()  # of whole parameters too, which `release` would hide
            raise
        finally:
            self.release()
            self._units[-1].set_requires_gradient_sync(True)  # as the caller's own passes expect it

    def backward(self, descriptors: Tensor, gradient: Tensor, is_last: bool) -> None:
        # Without synchronisation FSDP adds whole gradients up; the last pass reduces the sum. They
        # would take the memory that `reshard: pass` is to save, so there each pass reduces them, to
        # the shards of a host; sums over hosts, if shards have copies there, wait for the last one.
        reduces = self._syncs and (is_last or self.lockstep)
        root = self._units[-1]
        root.set_requires_gradient_sync(reduces)
        if self.lockstep:
            root.set_requires_all_reduce(reduces and is_last)
        root.set_is_last_backward(is_last or self.lockstep)
        with self.world.collective("reduction of the gradients") if reduces else nullcontext():
            super().backward(descriptors, gradient, is_last)

    def reduce(self) -> None:
        """Do nothing: the last backward pass has reduced the gradients."""

    def discard(self) -> None:
        super().discard()
        for unit in self._units:
            for group in _groups_of(unit):
                group._partial_reduce_output = None  # sums of a host, which wait for other hosts

    def release(self) -> None:
        """Free all parameters but this rank's shards, and reshard as before from now on."""
        for unit, before in zip(self._units, self._before, strict=True):
            unit.reshard()
            before.restore()

    def _prepare(self) -> None:
        if self.lockstep:
            self._stay_whole(False)
        else:
            self._gather()

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


class _Resharding:
    """When a unit is freed, and what it prefetches: settings of the caller, to be restored."""

    def __init__(self, unit: FSDPModule, is_root: bool) -> None:
        self._state: Any = unit._get_fsdp_state()
        self._prefetched = self._state._states_to_backward_prefetch
        # FSDP keeps the network itself whole after a forward pass unless the caller said otherwise.
        stays = is_root and self._state._auto_reshard_after_forward
        self._groups = [
            (group, None if stays else group.post_forward_mesh_info, group.reshard_after_backward)
            for group in _groups_of(unit)
        ]

    def restore(self) -> None:
        self._state._states_to_backward_prefetch = self._prefetched
        for group, after_forward, after_backward in self._groups:
            group.post_forward_mesh_info = after_forward
            group.reshard_after_backward = after_backward


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the unit's groups of parameters that travel together: one, or none."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # older torch


def shard(
    network: nn.Module,
    world: World,
    *,
    unit: Unit = "auto",
    gather: Gather = "float32",
    reshard: Reshard = "step",
    within: Within = "all",
) -> None:
    """Shard a network, which has the same parameters on every rank; gradients are summed over all.

    Args:
        unit: what is gathered in one message: the whole `network`, or each of its `blocks`.
        gather: dtype in which matrices of blocks are gathered; vectors keep theirs.
        reshard: as of FSDPReplica.
        within: the ranks among which a parameter is cut: `all`, or those of a `host`.
    Raises:
        DistapError: trained parameters have several dtypes, the network has no blocks, hosts have
            other numbers of ranks, or torch is too old for `gather`.
    """
    trained = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
    if len(trained) > 1:
        raise DistapError(
            "engine.several_dtypes",
            f"trained parameters are {', '.join(map(str, trained))}; FSDP reduces only one dtype",
        )
    blocks = blocks_to_gather(network, unit, gather, reshard)
    make_contiguous(network)
    mesh = _mesh_of(world, within)
    policy = half_policy() if gather == "bf16" else MixedPrecisionPolicy()
    units = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in blocks]
    for block in blocks:
        _keep_strides(block)
    # What lies outside of blocks, such as pooling and head, computes in float32 even under
    # autocast.
    for sharded in [*units, fully_shard(network, mesh=mesh)]:
        # Stage two has divided by the global number of queries: gradients are summed, where FSDP
        # would average.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def half_policy() -> MixedPrecisionPolicy:
    """Gather matrices in bfloat16, as autocast casts them anyway, and add gradients in float32."""
    if "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__:
        raise DistapError(
            "package.too_old",
            f"engine.gather: torch {torch.__version__} gathers a whole block in one dtype; take a"
            " newer one, or leave gather out",
        )
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        # Autocast chooses the dtype of each operation, as it does without FSDP. Normalisations want
        # their vectors in float32.
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: parameter.dtype if parameter.ndim < 2 else None,
    )


def _keep_strides(block: nn.Module) -> None:
    """Let a block see the strides that its inputs have, with a graph as without one."""
    # FSDP passes inputs that have a graph on as a view. That of a lone image in channels-last
    # memory has other strides, by which it counts as contiguous: convolutions would then choose
    # another layout in replay than in describe, and dropout, which draws in the order of memory,
    # would drop other numbers.
    strides = list[tuple[int, ...] | None]()

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        strides[:] = [item.stride() if isinstance(item, Tensor) else None for item in inputs]

    def restore(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            item
            if stride is None or item.stride() == stride
            else item.as_strided(item.shape, stride)
            for item, stride in zip(inputs, strides, strict=True)
        )

    block.register_forward_pre_hook(note, prepend=True)
    block.register_forward_pre_hook(restore)


def goes_by_blocks(parameters: int, unit: Unit, gather: Gather, reshard: Reshard) -> bool:
    """Return whether a network of so many parameters is gathered block by block.

    `auto` takes blocks where a billion parameters or another setting need them.
    """
    if unit == "auto":
        return gather == "bf16" or reshard == "pass" or parameters >= LARGE
    return unit == "blocks"


def blocks_to_gather(
    network: nn.Module, unit: Unit = "auto", gather: Gather = "float32", reshard: Reshard = "step"
) -> list[nn.Module]:
    """Return the blocks that `shard` gathers one by one; none if the network is one unit."""
    if not goes_by_blocks(numel(network), unit, gather, reshard):
        return []
    try:
        return [block for _, block in blocks_of(network)]
    except DistapError as error:
        if goes_by_blocks(0, unit, gather, reshard):  # also if it were small
            raise
        logger.warning("engine.unit: auto gathers the network whole: %s", error)
        return []


def _mesh_of(world: World, within: Within) -> DeviceMesh:
    """Return the mesh of the ranks: all in one dimension, or (hosts, ranks of a host)."""
    if within == "all":
        return mesh_of(world)
    ranks = dict[str, list[int]]()
    for rank, host in enumerate(world.hosts or [""] * world.size):
        ranks.setdefault(host, []).append(rank)
    if len({len(of_host) for of_host in ranks.values()}) > 1:
        counts = ", ".join(f"{host} has {len(of_host)}" for host, of_host in ranks.items())
        raise DistapError(
            "engine.uneven_hosts",
            f"engine.within is host, which needs as many ranks on each host, but {counts}; set it"
            " to all, or start as many ranks on each",
        )
    return DeviceMesh(
        world.device.type, list(ranks.values()), mesh_dim_names=("hosts", "ranks_of_a_host")
    )


def make_contiguous(network: nn.Module) -> None:
    """Make every parameter contiguous, and one without dimensions a vector of one number."""
    for parameter in network.parameters():
        parameter.data = parameter.data.reshape(-1).view(parameter.shape or 1)
