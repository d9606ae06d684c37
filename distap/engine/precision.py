"""Mixed precision: autocast regions, and the loss scale of float16."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distap.engine.settings import PrecisionName

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWS_AFTER = 2000  # finite steps in a row, as in torch's GradScaler


def autocast(precision: PrecisionName, device_type: str = "cpu") -> AbstractContextManager[None]:
    """A new region in which convolutions and matrix products have this dtype; `float32` changes nothing.

    Do not enter it twice: it caches casts of weights, which are stale after the next update.
    """
    dtype = None if precision == "float32" else DTYPES[precision]  # a float64 network stays float64
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def describing_in(precision: PrecisionName, network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that describes images (n, 3, height, width) without a graph, in this precision."""

    def describe(images: Tensor) -> Tensor:
        with torch.no_grad(), autocast(precision, images.device.type):
            descriptors: Tensor = network(images)
            return descriptors

    return describe


@dataclass
class LossScale:
    """The factor on gradients that keeps small float16 ones from vanishing; in other precisions it stays 1.

    torch's GradScaler looks at the gradients of one rank. Here the norm of the whole gradient decides, so the scale
    is the same on every rank and under every engine.
    """

    precision: PrecisionName
    # From torch's 65536, the first steps would be skipped: gradients of descriptors are about 1e-4 long.
    scale: float = 1024.0
    growth: int = 0

    def __post_init__(self) -> None:
        if self.precision != "fp16":
            self.scale = 1.0

    def update(self, is_finite: bool) -> None:
        if self.precision != "fp16":
            return
        self.growth = self.growth + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self.growth == GROWS_AFTER:
            self.scale, self.growth = 2 * self.scale, 0

    def state_dict(self) -> dict[str, Tensor]:
        if self.precision != "fp16":
            return {}
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return {"scaler.scale": scale, "scaler.growth": torch.tensor(self.growth)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.precision == "fp16" and "scaler.scale" in state:  # not in a checkpoint of another precision
            self.scale, self.growth = float(state["scaler.scale"]), int(state["scaler.growth"])
