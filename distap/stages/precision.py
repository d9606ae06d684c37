"""Mixed precision: the dtype in which a network computes, while parameters and descriptors stay float32."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def autocast(precision: str, device_type: str = "cpu") -> AbstractContextManager[None]:
    """Enter a new region that computes convolutions and matrix products in this dtype; `float32` does nothing.

    Do not enter it twice: it caches casts of weights, which are stale after the next update.
    """
    # Without a dtype a float64 network stays float64.
    dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def computing_in(precision: str, network: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a function that describes images (n, 3, height, width) in this precision."""

    def describe(images: Tensor) -> Tensor:
        with autocast(precision, images.device.type):
            return network(images)

    return describe
