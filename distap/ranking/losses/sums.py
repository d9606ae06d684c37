"""Weighted sums of losses."""

from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

import torch

from distap.ranking.loss import Budget, Gathered, Loss, LossValue
from distap.registry import Chosen


@dataclass(frozen=True)
class WeightedSum(Loss):
    """The sum of losses, each multiplied by its weight."""

    terms: tuple[tuple[float, Annotated[Any, Chosen("loss")]], ...]  # weight and loss of each

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """The sums of the values, of the losses by query if all terms have them, and of the gradients."""
        parts = [(weight, loss.value_and_gradient(gathered, budget)) for weight, loss in self.terms]
        by_query = [weight * part.per_query for weight, part in parts if part.per_query is not None]
        return LossValue(
            reduce(torch.add, [weight * part.value for weight, part in parts]),
            reduce(torch.add, by_query) if len(by_query) == len(parts) else None,
            reduce(torch.add, [weight * part.gradient for weight, part in parts]),
        )
