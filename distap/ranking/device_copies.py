"""Copy between the CPU and a device with a queue, such as a GPU, while neither waits.

An ordinary copy waits until the device has done all work that is queued on it, and leaves it idle
meanwhile.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class ToHost:
    """A tensor on its way to the CPU; the copy starts after the work now queued on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived = None
        self._copy = tensor
        if tensor.device.type != "cpu":
            # Page-locked: a copy to other memory would make the host wait, whatever `non_blocking`
            # says.
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = (
                torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()
            )

    def is_here(self) -> bool:
        """Return whether reading `tensor` returns without waiting."""
        return self._arrived is None or self._arrived.query()

    def tensor(self) -> Tensor:
        """Wait for the copy on the CPU and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


def moved(images: Any, device: torch.device) -> Any:
    """Copy images (nested tensors) to a device; from page-locked memory the host does not wait."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), images)


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device, without waiting; work queued later sees it."""
    # The page-locked copy may be dropped at once: torch's allocator does not hand its memory out
    # again before the device has read it.
    crosses = tensor.device.type == "cpu" != device.type
    return tensor.pin_memory().to(device, non_blocking=True) if crosses else tensor.to(device)
