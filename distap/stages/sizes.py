"""Find how large micro-batches may be and how many graphs fit in memory, by trying."""

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distap.errors import DistapError
from distap.stages.exactness import SavedBuffers
from distap.stages.micro_batches import is_out_of_memory
from distap.stages.replica import Replica
from distap.world import World

ENOUGH_FASTER = 1.03  # doubling a micro-batch must make an image at least this much faster to be worth its memory
SOON_TRIED = 0.3  # seconds of a pass; so short a pass is no reason to stop, because tiny ones can mislead
MOST_PASSES, REPEATED_SECONDS = 6, 1.0  # of one size; short passes are repeated, since other work disturbs some
SHARE_FOR_ONE = 0.25  # most of the free memory for one micro-batch: kept graphs gain more by the rest
SHARE_FOR_GRAPHS = 0.5  # of the memory that is free after a step; the rest stays free for peaks within a step
CGROUP = Path("/sys/fs/cgroup")
logger = logging.getLogger("distap")


class Fitting:
    """Find micro-batch sizes by trying up to `share` random images, in the same order on every rank.

    With a `width`, descriptors of so many dimensions stand for images.
    """

    def __init__(self, replica: Replica, world: World, image_size: int, share: int, width: int = 0) -> None:
        if replica.lockstep:
            raise DistapError(
                "replay.size cannot be auto with this engine: its ranks communicate in every micro-batch, so none "
                "may run out of memory by itself"
            )
        self._replica, self._world, self._image_size, self._share = replica, world, image_size, share
        self._width = width

    def replay_size(self) -> int:
        """Return the micro-batch size that is fastest per image, forward and backward, the same on all ranks.

        It leaves memory for other graphs than its own.

        Raises:
            DistapError: not even one image fits the memory of every rank.
        """
        # Double the size until the slowest rank gains no more. Two images can take longer than one, and sixteen much
        # less, where small sizes have other kernels: short passes end no search.
        best, best_seconds, size, most = 0, math.inf, 1, math.inf
        with _untouched(self._replica):
            while True:
                seconds = self._world.maximum(self._seconds_an_image(size))
                if seconds * ENOUGH_FASTER < best_seconds:
                    best, best_seconds = size, seconds
                elif math.isinf(seconds) or seconds * size > SOON_TRIED:
                    break
                if size == 1 and best:
                    room = SHARE_FOR_ONE * free_memory(self._world.device) / max(self._bytes_of_graph(1), 1)
                    # The least room of any rank, since all try the same sizes: each try ends in a collective.
                    most = -self._world.maximum(-room)
                if size == self._share or 2 * size > most:
                    break
                size = min(2 * size, self._share)
        if best == 0:
            raise DistapError(
                f"replay: not even one image of {self._image_size} x {self._image_size} pixels fits the memory of "
                "every rank; choose a smaller data.image_size or backbone"
            )
        if self._world.rank == 0:
            logger.info("replay: micro-batches of %d images, %.1f images/s a rank", best, 1 / best_seconds)
        return best

    def kept_graphs(self, size: int) -> int:
        """Return how many micro-batches of `size` images can keep their graph on this rank, judged after one step."""
        size = min(size, self._share)
        try:
            graph = self._bytes_of_graph(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return 0
        # After a step, since its peak is what all memory but the graphs amounts to: optimiser, buckets, workspaces.
        room = free_memory(self._world.device) * SHARE_FOR_GRAPHS
        needed = -(-self._share // size)
        count = min(int(room / max(graph, 1)), needed)
        text = "%d of %d micro-batches keep their graph, which takes %.2f GB each; %.2f GB may be used"
        logger.info(text, count, needed, graph / 1e9, room / 1e9)
        return count

    def _seconds_an_image(self, size: int) -> float:
        # Infinity if memory runs out: then the size loses on all ranks.
        device = self._world.device
        try:
            images = self._images(size)
            seconds: list[float] = []
            while len(seconds) < 2 or (len(seconds) < MOST_PASSES and sum(seconds) < REPEATED_SECONDS):
                started = time.perf_counter()
                _there_and_back(self._replica, images)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            return min(seconds[1:]) / size  # the first pass of a size includes its set-up
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return math.inf

    def _bytes_of_graph(self, size: int) -> int:
        replica, images = self._replica, self._images(size)
        with replica.describing():  # parameters are whole here, so their storages can be told from the graph's
            saved = SavedBytes(replica.network)
        with _untouched(replica):
            _there_and_back(replica, images, saved)
        return saved.bytes

    def _images(self, size: int) -> Tensor:
        if self._width:
            return torch.randn(size, self._width, device=self._world.device)
        shape = (size, 3, self._image_size, self._image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self._world.device)


class SavedBytes(saved_tensors_hooks):
    """Count the bytes that autograd keeps for the backward pass, without the network's own tensors."""

    def __init__(self, network: nn.Module) -> None:
        # Parameters are saved too, but are there without a graph as well.
        self._own = {_storage(tensor) for tensor in (*network.parameters(), *network.buffers())}
        self._saved: dict[int, torch.UntypedStorage] = {}  # holding them keeps an address from being used twice
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
    """Return how many bytes this rank may use beyond its peak so far; ranks of a host share its free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    room = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), sys.maxsize)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            room = min(room, max(int(limit) - int(used), 0))
    except OSError:
        pass  # no container
    return room // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _storage(tensor: Tensor) -> int:
    # A fake tensor has no memory address, but its storage is an object with one.
    return int(tensor.untyped_storage()._cdata)


def _there_and_back(replica: Replica, images: Tensor, during_forward: Any = None) -> None:
    with replica.replaying():
        with during_forward or nullcontext():
            descriptors = replica.forward(images)
        replica.backward(descriptors, torch.zeros_like(descriptors), is_last=False)


@contextmanager
def _untouched(replica: Replica) -> Iterator[None]:
    # Trying must not change the training: no gradient stays, and buffers are as before.
    buffers = SavedBuffers(replica.network)
    try:
        yield
    finally:
        replica.discard()
        buffers.restore()
