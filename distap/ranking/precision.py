"""The precision of similarities and gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Outside autocast and without TF32: rounded similarities fall into other bins, and gradients show it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
