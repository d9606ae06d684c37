"""Copy pixels to a GPU while it computes."""

from collections import deque

import torch
from torch import Tensor

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

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the pixels on the device; pinned ones are copied while the device works."""
        if len(self._begun) == AHEAD:
            self._begun.popleft().synchronize()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = pixels.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        # The copy stream owns this memory; tell the allocator not to reuse it before the computing stream is done.
        copy.record_stream(computing)
        self._begun.append(computing.record_event())
        return copy
