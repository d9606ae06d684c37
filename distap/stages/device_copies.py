"""Pixels on their way to a GPU while it computes."""

from collections import deque

import torch
from torch import Tensor

AHEAD = 2  # micro-batches that the host prepares before the device has computed the present one


class DeviceCopies:
    """Copies micro-batches to the device beside its computing; on a CPU there is nothing to copy.

    The host does not wait for the device but to stay `AHEAD` of it, so the next pixels are there in time and no more
    than that of them take room.

    Args:
        device: to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: deque[torch.cuda.Event] = deque()  # when the device reached the micro-batches before

    def __call__(self, pixels: Tensor) -> Tensor:
        """The pixels on the device, for what is queued there next; copied while it works where they are pinned."""
        if self._stream is None:
            return pixels.to(self._device)
        if len(self._begun) == AHEAD:
            self._begun.popleft().synchronize()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = pixels.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        # Its memory belongs to the stream of copies, which must not take it for the next before it has been used.
        copy.record_stream(computing)
        self._begun.append(computing.record_event())
        return copy
