"""What the three stages ask of an engine."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

# Called once the parameters are those to be trained: an engine may replace a network's by its shards.
BuildOptimizer = Callable[[], Optimizer]


@runtime_checkable
class Engine(Protocol):
    """A network spread over the ranks, and its optimiser.

    Parameters move along the sum over ranks of what `backward` was given: stage two has divided by the global
    number of queries already. Every engine is held to that by the same test.
    """

    network: nn.Module

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must replay the same number of micro-batches, since each of them communicates."""
        ...

    @property
    def keeps_graphs(self) -> bool:
        """Whether `forward` may be called several times before the backward passes."""
        ...

    @property
    def reductions(self) -> int:
        """Collectives over parameters' gradients so far."""
        ...

    @property
    def reduce_seconds(self) -> float:
        """Seconds that this rank waited for other ranks' parameters and gradients so far."""
        ...

    def describing(self) -> AbstractContextManager[None]:
        """Encloses stage one, and evaluation: parameters are whole meanwhile, so that a rank describes by itself."""
        ...

    def describe(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, float32 or wider, without a graph; inside `describing`."""
        ...

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, float32 or wider, with a graph.

        Inside `accumulating`; or, of an engine that keeps graphs, inside `describing`.
        """
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward of a micro-batch, or the backward of a kept graph.

        Ranks reduce gradients in the last one of a step only, unless the engine is one in lockstep.
        """
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
        """Forget the gradients: the step is skipped, or its replay begins anew."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of `network.`, `optimizer.` and `scaler.`, named so that any engine can go on from them."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, on any number of ranks."""
        ...
