"""Micro-batches as large as is fast and fits, and as many kept graphs as memory allows: found by trying."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distap.distributed import World
from distap.engine import Engine
from distap.errors import DistapError
from distap.micro_batches import is_out_of_memory

ENOUGH_FASTER = 1.03  # a size twice as large is worth its memory where it is faster an image by this
SHARE_FOR_GRAPHS = 0.5  # of the memory that is free after a step; the rest is for what a step may need once
CGROUP = Path("/sys/fs/cgroup")
logger = logging.getLogger("distap")


class Fitting:
    """Tries micro-batches of random images on every rank alike.

    Args:
        engine: the network over the ranks.
        world: the ranks.
        image_size: width and height, pixels.
        share: most images of a rank in a step.
    Raises:
        DistapError: the ranks communicate in each micro-batch, so that one rank cannot try and fail by itself.
    """

    def __init__(self, engine: Engine, world: World, image_size: int, share: int) -> None:
        if engine.lockstep:
            raise DistapError(
                "describe.size or replay.size is auto, but with this engine ranks communicate in every micro-batch, "
                "so that none can run out of memory by itself; set both to numbers"
            )
        self._engine, self._world, self._image_size, self._share = engine, world, image_size, share

    def replay_size(self) -> int:
        """The size of a micro-batch with a graph that is fastest an image."""

        with _untouched(self._engine):
            return self._fastest("replay", partial(_there_and_back, self._engine))

    def describe_size(self, describe: Callable[[Tensor], Tensor] | None = None) -> int:
        """The size of a micro-batch without a graph that is fastest an image.

        Args:
            describe: what describes instead of the engine.
        """
        with self._engine.describing(), torch.no_grad():
            return self._fastest("describe", describe or self._engine.describe)

    def kept_graphs(self, size: int) -> int:
        """How many micro-batches of `size` images can keep their graph beside what a step takes, on this rank.

        To be asked after a step, when what that took is known to the allocator.
        """
        graph = bytes_of_graph(self._engine, self._images(size))
        room = free_memory(self._world.device) * SHARE_FOR_GRAPHS
        count = min(int(room / max(graph, 1)), -(-self._share // size))
        logger.info(
            "%d of %d micro-batches keep their graph, which takes %.2f GB each; %.2f GB were free for them",
            count,
            -(-self._share // size),
            graph / 1e9,
            room / 1e9,
        )
        return count

    def _fastest(self, stage: str, attempt: Callable[[Tensor], Any]) -> int:
        """The size with the fewest seconds an image on the slowest rank; the same on all ranks."""
        best, best_seconds, size = 0, math.inf, 1
        while True:
            seconds = self._world.maximum(self._seconds_an_image(size, attempt))
            if seconds * ENOUGH_FASTER > best_seconds or math.isinf(seconds):
                break
            best, best_seconds = size, seconds
            if size >= self._share:
                break
            size = min(2 * size, self._share)
        if best == 0:
            raise DistapError(
                f"{stage}: not even one image of {self._image_size} x {self._image_size} pixels fits the memory of "
                "every rank; choose a smaller data.image_size or backbone"
            )
        if self._world.rank == 0:
            logger.info("%s: micro-batches of %d images, %.1f images/s a rank", stage, best, 1 / best_seconds)
        return best

    def _seconds_an_image(self, size: int, attempt: Callable[[Tensor], Any]) -> float:
        """Infinite where memory does not suffice."""
        try:
            images = self._images(size)
            attempt(images)  # the first of its size sets things up
            self._synchronize()
            started = time.perf_counter()
            attempt(images)
            self._synchronize()
            return (time.perf_counter() - started) / size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return math.inf

    def _images(self, size: int) -> Tensor:
        shape = (size, 3, self._image_size, self._image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self._world.device)

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def bytes_of_graph(engine: Engine, images: Tensor) -> int:
    """Bytes that a forward pass of these images keeps for its backward pass, beside the parameters."""
    with engine.describing():  # where they are whole
        parameters = {tensor.untyped_storage().data_ptr() for tensor in engine.network.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _untouched(engine), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _there_and_back(engine, images)
    return sum(storages.values())


def _there_and_back(engine: Engine, images: Tensor) -> None:
    with engine.accumulating(is_last=False):
        descriptors = engine.forward(images)
        engine.backward(descriptors, torch.zeros_like(descriptors))


@contextmanager
def _untouched(engine: Engine) -> Iterator[None]:
    """Leave no gradient, and running statistics as they were."""
    before = [buffer.clone() for buffer in engine.network.buffers()]
    yield
    engine.discard()
    with torch.no_grad():
        for buffer, value in zip(engine.network.buffers(), before, strict=True):
            buffer.copy_(value)


def free_memory(device: torch.device) -> int:
    """Bytes that this rank may take more of, beside the most that it has taken so far."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    available = [_mem_available(), *_cgroup_room()]
    return min(available) // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _mem_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _cgroup_room() -> list[int]:
    """What a container's limit leaves; nothing where there is none."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return []
    return [] if limit == "max" else [max(int(limit) - int(used), 0)]
