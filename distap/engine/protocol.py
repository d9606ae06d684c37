"""The contract between the three stages and an engine."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

# An engine may replace the network's parameters by shards, so it calls this when the final ones are in place.
BuildOptimizer = Callable[[], Optimizer]


@runtime_checkable
class Replica(Protocol):
    """A network on this rank as the three stages use it: it describes, and it sends gradients back."""

    network: nn.Module

    @property
    def lockstep(self) -> bool:
        """Tell whether all ranks must replay the same number of micro-batches, because each one communicates."""
        ...

    @property
    def keeps_graphs(self) -> bool:
        """Tell whether `forward` may be called several times before the backward passes."""
        ...

    @property
    def reduce_seconds(self) -> float:
        """Seconds that this rank has waited for other ranks' parameters and gradients so far."""
        ...

    def describing(self) -> AbstractContextManager[None]:
        """Enclose stage one or an evaluation: parameters are whole inside, so each rank describes on its own."""
        ...

    def describe(self, images: Tensor) -> Tensor:
        """Return descriptors (n, C), float32 or wider, without a graph; call it inside `describing`."""
        ...

    def forward(self, images: Tensor) -> Tensor:
        """Return descriptors (n, C), float32 or wider, with a graph.

        Call it inside `accumulating`; an engine that keeps graphs also allows it inside `describing`.
        """
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward pass of a micro-batch, or the backward pass of a kept graph.

        Ranks reduce gradients only in the last one of a step, unless the engine works in lockstep.
        """
        ...

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Add the parameter gradients that follow from dL/d descriptors, `gradient` (n, C)."""
        ...

    def discard(self) -> None:
        """Clear the gradients, because the step is skipped or its replay starts again."""
        ...


@runtime_checkable
class Engine(Replica, Protocol):
    """A network spread over the ranks, and its optimiser.

    Parameters move along the sum over ranks of what `backward` was given, because stage two has already divided by
    the global number of queries.
    """

    def update(self, learning_rate: float) -> float:
        """Move the parameters and clear the gradients.

        Returns:
            The norm of the whole gradient before clipping. If it is not finite, nothing has moved.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors `network.*`, `optimizer.*` and `scaler.*`, named the same by every engine."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the `state_dict` of any engine on any number of ranks."""
        ...
