"""Weighted sums of losses."""

from dataclasses import dataclass
from typing import Annotated, Any

from distap.ranking.loss import Budget, Gathered, Loss, LossValue
from distap.registry import Chosen


@dataclass(frozen=True)
class WeightedSum(Loss):
    """The sum of losses, each multiplied by its weight.

    Args:
        terms: weight and loss of each.
    """

    terms: tuple[tuple[float, Annotated[Any, Chosen("loss")]], ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """The sums of the values, of the losses by query if all terms have them, and of the gradients."""
        weights, losses = zip(*self.terms, strict=True)
        parts = [loss.value_and_gradient(gathered, budget) for loss in losses]
        values, per_query, gradients = (
            None if None in part else sum(weight * each for weight, each in zip(weights, part, strict=True))
            for part in zip(*parts, strict=True)
        )
        return LossValue(values, per_query, gradients)
