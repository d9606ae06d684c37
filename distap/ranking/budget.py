"""How many pairs of images are ranked at once, from the memory there is."""

from dataclasses import dataclass

import torch

# A tile of pairs that stays in a CPU's cache while everything is done to it; on a GPU, one that keeps it busy.
CPU_TILE_PAIRS, GPU_TILE_PAIRS = 2**19, 2**26
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
        if memory is None:
            memory = torch.cuda.mem_get_info(device)[0] // 4
        return Budget(memory, GPU_TILE_PAIRS)

    def pairs(self, itemsize: int) -> int:
        """Pairs of a tile of values of `itemsize` bytes."""
        return max(1, min(self.tile_pairs, self.bytes // 2 // (TENSORS_A_PAIR * itemsize)))

    def rows(self, columns: int, itemsize: int) -> int:
        """Height of a tile of this width."""
        return max(1, self.pairs(itemsize) // max(columns, 1))

    def square(self, itemsize: int) -> int:
        """Height of a tile about as wide as high: such tiles make the matrix product fastest."""
        return max(1, int(self.pairs(itemsize) ** 0.5))

    def keeps(self, size: int) -> bool:
        """Whether so many bytes may be kept from one pass to the next."""
        return size <= self.bytes // 2
