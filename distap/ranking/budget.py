"""How many pairs of images are ranked at once, from the memory there is."""

import functools
from dataclasses import dataclass

import torch

# A tile of pairs that stays in a CPU's cache while everything is done to it; on a GPU, one that keeps it busy.
CPU_TILE_PAIRS, GPU_TILE_PAIRS = 2**19, 2**26
MOST_COLUMNS = 2**20  # so that sums over a row stay exact to float32's rounding
TENSORS_A_PAIR = 8  # values of the descriptors' dtype alive at once for each pair of a tile


@dataclass(frozen=True)
class Budget:
    """Memory for ranking beside the descriptors, in bytes; half of it for tiles, half to keep between passes."""

    bytes: int
    tile_pairs: int

    @staticmethod
    def of(device: torch.device, memory: int | None = None) -> "Budget":
        """`memory` bytes, or what suits the device: 1 GiB on a CPU, a quarter of what is free on a GPU."""
        if device.type != "cuda":
            return Budget(2**30 if memory is None else memory, CPU_TILE_PAIRS)
        return Budget(_free_at_first(device) // 4 if memory is None else memory, GPU_TILE_PAIRS)

    def pairs(self, itemsize: int) -> int:
        """Pairs of a tile of values of `itemsize` bytes."""
        return max(1, min(self.tile_pairs, self.bytes // 2 // (TENSORS_A_PAIR * itemsize)))

    def rows(self, columns: int, itemsize: int) -> int:
        """Height of a tile of this width."""
        return max(1, self.pairs(itemsize) // max(columns, 1))

    def columns(self, rows: int, itemsize: int) -> int:
        """Width of a tile of this height."""
        return min(MOST_COLUMNS, max(1, self.pairs(itemsize) // max(rows, 1)))

    def keeps(self, size: int) -> bool:
        """Whether so many bytes may be kept from one pass to the next."""
        return size <= self.bytes // 2


@functools.cache
def _free_at_first(device: torch.device) -> int:
    """Free memory of a GPU when first asked for, so that tiles are the same in every step.

    What PyTorch holds without using it is free.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
