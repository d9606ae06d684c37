"""Tensors whose rows the ranks share out, in equal parts but for the last ones."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distap.world import World

# Rows that are drawn at once; a multiple of 16, see `drawn_rows`.
DRAWN_ROWS = 4096


def mesh_of(world: World) -> DeviceMesh:
    """Return the ranks as a mesh of one dimension, for tensors that they share out."""
    group = world.group or dist.group.WORLD
    assert group is not None
    return DeviceMesh.from_group(group, world.device.type)


def part_of_rank(count: int, world: World) -> range:
    """Return this rank's part of `count` rows, cut as torch.chunk and DTensor do."""
    length = -(-count // world.size)
    start = min(world.rank * length, count)
    return range(start, min(start + length, count))


def drawn_rows(count: int, dimensions: int, seed: int, rows: range) -> Float[Tensor, "n C"]:
    """Return some rows of a normal `torch.randn(count, dimensions)`, the rest of which is not held.

    Every rank draws all rows up to its last.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(len(rows), dimensions)
    start = 0
    while start < rows.stop:
        # Torch makes normal numbers 16 at a time, and the last ones of a call in another way: in
        # blocks of a multiple of 16, of which the last is not short, they are those of one call.
        stop = count if count - start < 2 * DRAWN_ROWS else start + DRAWN_ROWS
        block = torch.randn(stop - start, dimensions, generator=generator)
        first = max(start, rows.start)
        last = min(stop, rows.stop)
        if first < last:
            drawn[first - rows.start : last - rows.start] = block[first - start : last - start]
        start = stop
    return drawn


def sharded(parts: Shaped[Tensor, "n *C"], count: int, world: World) -> DTensor:
    """Return the tensor of `count` rows of which each rank holds the part by `part_of_rank`."""
    shape = torch.Size([count, *parts.shape[1:]])
    return DTensor.from_local(
        parts, mesh_of(world), [Shard(0)], run_check=False, shape=shape, stride=parts.stride()
    )


def shards_like(whole: DTensor, parts: Shaped[Tensor, "n *C"]) -> DTensor:
    """Return the tensor of which each rank holds `parts`, shared out as `whole` is."""
    return DTensor.from_local(
        parts,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=parts.stride(),
    )
