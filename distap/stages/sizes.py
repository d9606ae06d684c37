"""Find how many graphs fit in memory, by trying one."""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distap.errors import logger, memory_ran_out
from distap.stages.exactness import SavedBuffers
from distap.stages.replica import Replica
from distap.world import World

# of the memory that is free after a step; the rest stays free for peaks within a step
SHARE_FOR_GRAPHS = 0.5
CGROUP = Path("/sys/fs/cgroup")


def kept_graphs(replica: Replica, world: World, images: Tensor, share: int) -> int:
    """Return how many micro-batches like `images` can keep their graph on this rank.

    Call it after one step, which has `share` images of this rank.
    """
    # parameters are whole here, so their storages can be told from the graph's
    with replica.describing():
        saved = SavedBytes(replica.network)
    # Trying must not change the training: no gradient stays, and buffers are as before.
    buffers = SavedBuffers(replica.network)
    try:
        with replica.replaying():
            with saved:
                descriptors = replica.forward(images)
            replica.backward(descriptors, torch.zeros_like(descriptors), is_last=False)
    except RuntimeError as error:
        if not memory_ran_out(error):
            raise
        return 0
    finally:
        replica.discard()
        buffers.restore()
    # After a step, since its peak is what all memory but the graphs amounts to: optimiser, buckets,
    # workspaces.
    room = free_memory(world.device) * SHARE_FOR_GRAPHS
    needed = -(-share // len(images))
    count = min(int(room / max(saved.bytes, 1)), needed)
    logger.info(
        "%d of %d micro-batches keep their graph, which takes %.2f GB each; %.2f GB may be used",
        count,
        needed,
        saved.bytes / 1e9,
        room / 1e9,
    )
    return count


class SavedBytes(saved_tensors_hooks):
    """Count the bytes that autograd keeps for the backward pass, but not the network's own."""

    def __init__(self, network: nn.Module) -> None:
        # Parameters are saved too, but are there without a graph as well.
        self._own = {_storage(tensor) for tensor in (*network.parameters(), *network.buffers())}
        # holding them keeps an address from being used twice
        self._saved: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes counted so far; tensors that share memory count once."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._own:
            self._saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor


def free_memory(device: torch.device) -> int:
    """Return how many bytes this rank may use beyond its peak; ranks of a host share its memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(
            free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        )
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    room = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")),
        sys.maxsize,
    )
    try:
        limit, used = (
            (CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
        if limit != "max":
            room = min(room, max(int(limit) - int(used), 0))
    except OSError:
        pass  # no container
    return room // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _storage(tensor: Tensor) -> int:
    # A fake tensor has no memory address, but its storage is an object with one.
    return int(tensor.untyped_storage()._cdata)
