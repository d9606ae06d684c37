"""Copy pixels to a GPU while it computes."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

AHEAD = 2  # micro-batches that the host prepares while the device computes


class DeviceCopies:
    """Copies micro-batches to a GPU on a stream of its own.

    The host runs `AHEAD` micro-batches ahead of the device and then waits, so the next pixels are there in time and
    no more than `AHEAD` micro-batches take memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun: deque[torch.cuda.Event] = deque()  # when the device reached each micro-batch

    def __call__(self, images: Any) -> Any:
        if len(self._begun) == AHEAD:
            self._begun.popleft().synchronize()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), images)
        computing.wait_stream(self._stream)
        # The copy stream owns this memory; tell the allocator not to reuse it before the computing stream is done.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(computing), copies)
        self._begun.append(computing.record_event())
        return copies


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that brings images, tensors in any nesting, to the device."""
    if device.type == "cuda":
        return DeviceCopies(device)
    return lambda images: tree_map_only(Tensor, lambda tensor: tensor.to(device), images)


def copied(images: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, images)
