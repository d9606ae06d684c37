"""What stage three asks of an engine."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Engine(Protocol):
    """A network spread over the ranks, and its optimiser.

    Parameters move along the sum over ranks of what `backward` was given: stage two has divided by the global
    number of queries already. Every engine is held to that by the same test.
    """

    network: nn.Module  # for forwards without a graph

    @property
    def reductions(self) -> int:
        """Collectives over parameters' gradients so far."""
        ...

    @property
    def reduce_seconds(self) -> float:
        """Seconds spent in them so far."""
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward of a micro-batch; ranks communicate in the last one only."""
        ...

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, with a graph."""
        ...

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that `gradient` (n, C), dL/d descriptors, leads to."""
        ...

    def update(self, learning_rate: float) -> float:
        """Move the parameters and forget the gradients.

        Returns:
            The norm of the whole gradient before clipping; where it is not finite, nothing has moved.
        """
        ...

    def discard(self) -> None:
        """Forget the gradients: the step is skipped."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of `network.` and `optimizer.`, named by parameter, so that another engine can go on from them."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, on any number of ranks."""
        ...
