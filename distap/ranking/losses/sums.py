"""Weighted sums of losses."""

from dataclasses import dataclass
from typing import Annotated, Any

from distap.ranking.budget import Budget
from distap.ranking.gathered import Gathered
from distap.ranking.protocol import LossValue
from distap.registry import Chosen


@dataclass(frozen=True)
class WeightedSum:
    """The sum of losses, each multiplied by its weight.

    Args:
        terms: weight and loss of each.
    """

    terms: tuple[tuple[float, Annotated[Any, Chosen("loss")]], ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """The sum of the losses and of their gradients."""
        total: LossValue | None = None
        for weight, loss in self.terms:
            value, per_query, gradient = loss.value_and_gradient(gathered, budget)
            term = LossValue(weight * value, None if per_query is None else weight * per_query, weight * gradient)
            total = term if total is None else _add(total, term)
        assert total is not None
        return total


def _add(one: LossValue, other: LossValue) -> LossValue:
    by_query = None
    if one.per_query is not None and other.per_query is not None:
        by_query = one.per_query + other.per_query
    return LossValue(one.loss + other.loss, by_query, one.gradient + other.gradient)
