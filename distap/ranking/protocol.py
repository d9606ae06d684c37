"""What a listwise loss takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Float64
from torch import Tensor

from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered

Mode = Literal["sharded", "central"]


class LossValue(NamedTuple):
    """A loss of the global batch, and this rank's part of its gradient."""

    loss: Float64[Tensor, ""]  # the same on every rank
    # Of this rank's queries, NaN for one without positive; the loss is their weighted mean. None for a loss that
    # is no mean over queries.
    per_query: Float64[Tensor, " b"] | None
    gradient: Float[Tensor, "b C"]


@dataclass(frozen=True)
class Ranking:
    """What stage two tells stage three; b are this rank's images."""

    loss: Float64[Tensor, ""]  # of the whole global batch, the same on every rank
    per_query: Float64[Tensor, " b"] | None  # loss of each own query, NaN without positive; None: not by query
    # Gradient of some of this rank's descriptors, (n, C) of (n,) rows, up to a multiple of each descriptor.
    gradient_of: Callable[[slice | Tensor], Tensor]
    queries: int  # of all ranks, with a positive
    skipped_queries: int  # of all ranks, without
    is_finite: bool  # on all ranks

    @cached_property
    def gradient(self) -> Float[Tensor, "b C"]:
        """Of all of this rank's descriptors."""
        return self.gradient_of(slice(None))


@runtime_checkable
class Loss(Protocol):
    """A listwise loss: a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """Loss of the whole batch and the gradient of `gathered.own`'s descriptors.

        The loss is a mean over all queries of all ranks, so gradients are to be summed over ranks, never
        averaged. A descriptor's similarity to itself is constant, so what would only lengthen or shorten it may
        be missing from its gradient: L2 normalisation takes that out anyway.

        Args:
            gathered: the batch; its dtype is the precision of similarities and gradients.
            budget: the memory that may be used beside the descriptors.
        """
        ...
