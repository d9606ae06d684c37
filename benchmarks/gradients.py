"""Whether two ways of training give the parameters the same gradient."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Recorded:
    """While it is entered, the gradient with which an optimiser updates is written down.

    Args:
        optimizer: None records nothing.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self.gradient: Tensor | None = None  # of all parameters, one after another

    def __enter__(self) -> "Recorded":
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_pre_hook(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._optimizer is not None:
            self._hook.remove()

    def _record(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def relative_difference(gradient: Tensor | None, exact: Tensor | None) -> float | None:
    """The length of the difference over that of the exact one; None where one of them is not known."""
    if gradient is None or exact is None:
        return None
    return float((gradient.double() - exact).norm() / exact.double().norm())
