"""Memory: what the graph of a forward pass takes, and what is free."""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

CGROUP = Path("/sys/fs/cgroup")


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward pass: each memory once, the network's own not at all."""

    def __init__(self, network: nn.Module) -> None:
        self._own = {_memory(tensor) for tensor in (*network.parameters(), *network.buffers())}
        self._saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Seen so far."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        if _memory(tensor) not in self._own:
            self._saved[_memory(tensor)] = tensor.untyped_storage()
        return tensor


def free_memory(device: torch.device) -> int:
    """Bytes that this rank may take more of, beside the most that it has taken so far."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    available = [_mem_available(), *_cgroup_room()]
    return min(available) // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _mem_available() -> int:
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), sys.maxsize)


def _cgroup_room() -> list[int]:
    """What a container's limit leaves; nothing where there is none."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return []
    return [] if limit == "max" else [max(int(limit) - int(used), 0)]


def _memory(tensor: Tensor) -> int:
    # A fake tensor has no address of memory, but its storage is an object.
    return int(tensor.untyped_storage()._cdata)
