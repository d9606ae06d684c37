"""Micro-batches as large as is fast and fits, and as many kept graphs as memory allows: found by trying."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distap.engine import Engine
from distap.errors import DistapError
from distap.stages.memory_use import SavedBytes, free_memory
from distap.stages.micro_batches import is_out_of_memory
from distap.world import World

ENOUGH_FASTER = 1.03  # a size twice as large is worth its memory where it is faster an image by this
SHARE_FOR_GRAPHS = 0.5  # of the memory that is free after a step; the rest is for what a step may need once
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
        size = min(size, self._share)
        try:
            graph = self._bytes_of_graph(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return 0
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

    def _bytes_of_graph(self, size: int) -> int:
        engine, images = self._engine, self._images(size)
        with engine.describing():  # where the parameters are whole
            saved = SavedBytes(engine.network)
        with _untouched(engine), engine.accumulating(is_last=False):
            with saved:
                descriptors = engine.forward(images)
            engine.backward(descriptors, torch.zeros_like(descriptors))
        return saved.bytes

    def _images(self, size: int) -> Tensor:
        shape = (size, 3, self._image_size, self._image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self._world.device)

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def _there_and_back(engine: Engine, images: Tensor) -> None:
    with engine.accumulating(is_last=False):
        descriptors = engine.forward(images)
        engine.backward(descriptors, torch.zeros_like(descriptors))


@contextmanager
def _untouched(engine: Engine) -> Iterator[None]:
    """Leave no gradient, and running statistics as they were."""
    before = [buffer.clone() for buffer in engine.network.buffers()]
    try:
        yield
    finally:
        engine.discard()
        with torch.no_grad():
            for buffer, value in zip(engine.network.buffers(), before, strict=True):
                buffer.copy_(value)
