"""Copy between the CPU and a device that works through a queue, such as a GPU, while neither waits for the other.

An ordinary copy waits until the device has done all work that is queued on it, and leaves it idle meanwhile.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

AHEAD = 2  # micro-batches that the host prepares while the device computes


class DeviceCopies:
    """Copy micro-batches to a device on a stream of its own.

    The host runs `AHEAD` micro-batches ahead of the device and then waits, so the next pixels are there in time and
    no more than `AHEAD` micro-batches take memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._begun = deque[Any]()  # when the device reached each micro-batch

    def __call__(self, images: Any) -> Any:
        if len(self._begun) == AHEAD:
            self._begun.popleft().synchronize()
        computing = self._module.current_stream(self._device)
        with self._module.stream(self._stream):
            copies = tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), images)
        computing.wait_stream(self._stream)
        # The copy stream owns this memory; tell the allocator not to reuse it before the computing stream is done.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(computing), copies)
        self._begun.append(computing.record_event())
        return copies


class ToHost:
    """A tensor on its way to the CPU; the copy starts after the work now queued on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived, self._copy = None, tensor
        if tensor.device.type != "cpu":
            # Page-locked: a copy to other memory would make the host wait, whatever `non_blocking` says.
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def is_here(self) -> bool:
        """Tell whether reading `tensor` returns without waiting."""
        return self._arrived is None or self._arrived.query()

    def tensor(self) -> Tensor:
        """Wait for the copy on the CPU and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that moves images (nested tensors) to the device."""
    if device.type == "cpu":
        return lambda images: tree_map_only(Tensor, lambda tensor: tensor.to(device), images)
    return DeviceCopies(device)


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device, without waiting; work queued later sees it."""
    # The page-locked copy may be dropped at once: torch's allocator does not hand its memory out again before the
    # device has read it.
    crosses = tensor.device.type == "cpu" != device.type
    return tensor.pin_memory().to(device, non_blocking=True) if crosses else tensor.to(device)
