"""Mixed precision: what the network computes in, and the scale that float16 needs."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.amp.grad_scaler import GradScaler

PrecisionName = Literal["float32", "bf16", "fp16"]
# Not torch's 65536: half of the steps that look for the right scale would be skipped, and descriptors' gradients of
# a batch of thousands are some 1e-4 long.
FIRST_SCALE = 1024.0
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """What convolutions and matrix products are computed in; parameters, descriptors and gradients stay float32.

    Args:
        name: `float32` changes nothing: a network in float64 stays so.
        device_type: `cpu` or `cuda`.
    """

    name: PrecisionName = "float32"
    device_type: str = "cpu"

    def autocast(self) -> AbstractContextManager[None]:
        """A fresh region: casts of weights that it remembers are stale after the next update."""
        region: AbstractContextManager[None] = torch.autocast(
            self.device_type, DTYPES[self.name] if self.name != "float32" else None, enabled=self.name != "float32"
        )
        return region

    def scaler(self) -> GradScaler | None:
        """What keeps the small gradients of float16 from vanishing; the other precisions need none."""
        return GradScaler(self.device_type, FIRST_SCALE) if self.name == "fp16" else None
