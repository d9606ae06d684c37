"""A weighted sum of losses."""

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import nn

from distap.ranking.gathered import Gathered
from distap.ranking.loss import Budget, Loss, LossValue
from distap.registry import Chosen, sum_in_full

# A loss within another: its name, a mapping of `name` and keys, or of names and weights.
Inner = Annotated[Any, Chosen("loss", at_once=True), BeforeValidator(sum_in_full)]


@dataclass(frozen=True)
class WeightedSum(Loss):
    """A sum of losses, each multiplied by a weight."""

    terms: tuple[tuple[float, Inner], ...]
    """Weight and loss of each term."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    @cached_property
    def learned(self) -> nn.Module | None:
        parts = [loss.learned for _, loss in self.terms if loss.learned is not None]
        return nn.ModuleList(parts) if parts else None

    def sized(self, classes: int | None, dimensions: int, seed: int) -> Loss:
        return replace(
            self, terms=tuple((weight, loss.sized(classes, dimensions, seed)) for weight, loss in self.terms)
        )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        parts = [(weight, loss.value_and_gradient(gathered, budget)) for weight, loss in self.terms]
        by_query = [weight * part.per_query for weight, part in parts if part.per_query is not None]
        return LossValue(
            reduce(torch.add, [weight * part.value for weight, part in parts]),
            reduce(torch.add, by_query) if len(by_query) == len(parts) else None,
            reduce(torch.add, [weight * part.gradient for weight, part in parts]),
            tuple(weight * one for weight, part in parts for one in part.by_parameters),
        )
