"""Build a network on rank 0 alone, and give the other ranks its values, or their shards of it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from distap.checkpoint.agreement import first_on_rank_0
from distap.model.hollow import Network, hollow_parameters
from distap.world import World


def built_once(build: Callable[[], Network], world: World) -> Network:
    """Build a network on rank 0, and on the other ranks one like it without parameters' values.

    Every rank calls it. The values come by `fill` or by `fill_shards`. Where a network cannot be
    built without them, as one that computes with them, the rank builds it in full.
    """
    begin = build if world.rank == 0 else partial(_without_values, build)
    network = first_on_rank_0(world, begin)
    shapes = world.gather_values(None if network is None else _shapes(network))
    if network is None or shapes[world.rank] != shapes[0]:
        return build()
    # A parameter that two modules share would become two when it gets its memory.
    return build() if world.rank and _shares_parameters(network) else network


def _without_values(build: Callable[[], Network]) -> Network | None:
    # An architecture's own code may raise anything.
    with suppress(Exception), hollow_parameters():
        return build()
    return None


def _shares_parameters(network: nn.Module) -> bool:
    return len([*network.named_parameters(remove_duplicate=False)]) > len([*network.parameters()])


def _shapes(network: nn.Module) -> list[list[object]]:
    """Return the name, shape and dtype of each tensor of a network, shared ones repeatedly."""
    tensors = [
        *network.named_parameters(remove_duplicate=False),
        *network.named_buffers(remove_duplicate=False),
    ]
    return [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]


def fill(network: nn.Module, world: World) -> None:
    """Give a network on its device rank 0's parameters and buffers on every rank."""
    give_memory(network, world.device)
    # Collectives take contiguous memory alone, and convolutions' weights are channels-last: copy_
    # keeps that layout.
    for tensor in [*network.parameters(), *network.buffers()]:
        tensor.data.copy_(world.broadcast(tensor.data.contiguous()))


def fill_shards(network: nn.Module, whole: Mapping[str, Tensor], world: World) -> None:
    """Give each rank its shards of rank 0's parameters, one parameter after another.

    Args:
        network: a network after `fully_shard`.
        whole: rank 0's whole parameters by name; on the other ranks they may be hollow.
    """
    give_memory(network, world.device)
    for name, parameter in network.named_parameters():
        values = whole[name].detach()
        if values.is_meta:
            values = torch.empty(values.shape, dtype=values.dtype, device=world.device)
        values = world.broadcast(values.contiguous())
        if isinstance(parameter, DTensor):
            values = distribute_tensor(
                values, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            parameter.copy_(values)
    for buffer in network.buffers():
        buffer.copy_(world.broadcast(buffer.contiguous()))


def give_memory(network: nn.Module, device: torch.device) -> None:
    """Move a network to a device; parameters without values get memory there, of any content."""
    network._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )
