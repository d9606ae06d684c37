"""Sums of losses: of several with weights, and of one on prefixes of descriptors (Matryoshka)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from pydantic import BeforeValidator, Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.ranking.loss import (
    Budget,
    Counter,
    DescriptorRows,
    FlagRows,
    KnownClasses,
    LabelRows,
    Loss,
    LossValue,
)
from distap.registry import Chosen, sum_in_full
from distap.world import World

# A loss within another: its name, a mapping of `name` and keys, or of names and weights.
Inner = Annotated[Any, Chosen("loss"), BeforeValidator(sum_in_full)]


class SumOfLosses(Loss):
    """A sum of losses, each multiplied by a weight."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[tuple[float, Loss]]:
        """Return the weight and the loss of each term of the sum."""

    @cached_property
    def learned(self) -> nn.Module | None:
        modules = [loss.learned for _, loss in self.parts if loss.learned is not None]
        # A parameter in two terms would stand twice in `by_parameters`, but once in a module's list
        # of parameters.
        ids = [id(parameter) for module in modules for parameter in module.parameters()]
        if len(set(ids)) < len(ids):
            raise DistapError(
                "loss.shared_parameters",
                f"{type(self).__name__}: several terms use the parameters of one"
                f" {type(modules[0]).__name__}; give each a module of its own, or take a loss by"
                " name, such as proxy_nca, which has parameters for each",
            )
        return nn.ModuleList(modules) if modules else None

    @property
    def asymmetric(self) -> bool:  # type: ignore[override]
        return all(loss.asymmetric for _, loss in self.parts)

    @property
    def takes_memory(self) -> bool | None:  # type: ignore[override]
        takes = {loss.takes_memory for _, loss in self.parts}
        return False not in takes and (True in takes or None)

    @property
    def extras(self) -> tuple[str, ...]:
        # each name once
        return tuple(dict.fromkeys(name for _, loss in self.parts for name in loss.extras))

    def shard_classes(self, world: World, above: int = 0) -> bool:
        has_classes = [loss.shard_classes(world, above) for _, loss in self.parts]
        return any(has_classes)

    def is_query(self, gathered: Gathered) -> Bool[Tensor, " B"]:
        return torch.stack([loss.is_query(gathered) for _, loss in self.parts]).all(0)

    def has_negatives(self, gathered: Gathered) -> bool:
        return all(loss.has_negatives(gathered) for _, loss in self.parts)

    def counter(self, pairs: int, budget: Budget) -> Counter:
        return CounterOfSum(self, pairs, budget)

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        return self.summed([loss.value_and_gradient(gathered, budget) for _, loss in self.parts])

    def summed(self, values: Sequence[LossValue]) -> LossValue:
        """Add the values and gradients of all terms."""
        weights = [weight for weight, _ in self.parts]
        terms = list(zip(weights, values, strict=True))
        # One term that is no mean over queries leaves the sum without losses by query.
        by_query = [
            weight * value.per_query for weight, value in terms if value.per_query is not None
        ]
        by_parameters = [weight * slope for weight, value in terms for slope in value.by_parameters]
        return LossValue(
            value=reduce(torch.add, [weight * value.value for weight, value in terms]),
            per_query=reduce(torch.add, by_query) if len(by_query) == len(terms) else None,
            gradient=reduce(torch.add, [weight * value.gradient for weight, value in terms]),
            by_parameters=tuple(by_parameters),
        )


class CounterOfSum(Counter):
    """Count for each term of a sum."""

    def __init__(self, loss: SumOfLosses, pairs: int, budget: Budget) -> None:
        super().__init__(loss, budget)
        # Counters keep what they have counted, all at the same time, so they share the memory for
        # it.
        shares = replace(budget, memory_bytes=2 * budget.half // len(loss.parts))
        self._sum = loss
        self._counters = [term.counter(pairs, shares) for _, term in loss.parts]

    def add(self, descriptors: DescriptorRows, labels: LabelRows, is_own: FlagRows) -> None:
        super().add(descriptors, labels, is_own)
        for counter in self._counters:
            counter.add(descriptors, labels, is_own)

    def value_and_gradient(self, gathered: Gathered) -> LossValue:
        return self._sum.summed(
            [counter.value_and_gradient(gathered) for counter in self._counters]
        )


@dataclass(frozen=True)
class WeightedSum(SumOfLosses):
    """A sum of losses, each multiplied by a weight."""

    terms: tuple[tuple[float, Inner], ...]
    """Weight and loss of each term."""

    # not as `min_length`, which would count a wrong term as one that is missing
    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of losses needs a term at least")

    @property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        return self.terms

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> Loss:
        return replace(
            self,
            terms=tuple(
                (weight, loss.sized(classes, dimensions, seed)) for weight, loss in self.terms
            ),
        )


@dataclass(frozen=True)
class Matryoshka(SumOfLosses):
    """A sum over several d of a loss of each descriptor's first d numbers (Kusupati et al. 2022).

    They are normalised again. Descriptors that are cut after training then still rank well.
    """

    dimensions: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Numbers d of dimensions, such as [64, 128, 256]; the whole descriptor counts only if it is
    among them."""
    inner: Inner
    """Loss of the cut descriptors, such as smooth_ap or {name: ap_q, bins: 25}."""
    weights: tuple[float, ...] | None = None
    """Weight of each number of dimensions; null weighs all 1."""

    def __post_init__(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.dimensions):
            raise ValueError(
                f"there are {len(self.weights)} weights for {len(self.dimensions)} dimensions"
            )

    @cached_property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        weights = self.weights or (1.0,) * len(self.dimensions)
        cut = [OfPrefix(d, self.inner.sized(None, d, 0)) for d in self.dimensions]
        return list(zip(weights, cut, strict=True))

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> Loss:
        if dimensions is not None and max(self.dimensions) > dimensions:
            raise DistapError(
                "loss.wrong_dimensions",
                f"matryoshka: dimensions has {max(self.dimensions)}, but descriptors have"
                f" {dimensions}",
            )
        return replace(self, inner=self.inner.sized(classes, None, seed))


class WrappedLoss(SumOfLosses):
    """A loss that gives another one, `inner`, a changed batch."""

    inner: Any

    @property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        return [(1.0, self.inner)]

    def counter(self, pairs: int, budget: Budget) -> Counter:
        return Counter(self, budget)


@dataclass(frozen=True)
class OfPrefix(WrappedLoss):
    """A loss of the first d numbers of each descriptor, normalised again."""

    d: int
    inner: Loss

    def counter(self, pairs: int, budget: Budget) -> Counter:
        return CounterOfPrefix(self, self.inner.counter(pairs, budget))

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        return self.undo_cut(gathered, self.inner.value_and_gradient(self.cut(gathered), budget))

    def prefix(self, descriptors: DescriptorRows) -> Float[Tensor, "n d"]:
        if descriptors.shape[1] < self.d:
            raise DistapError(
                "loss.wrong_dimensions",
                f"matryoshka: dimensions has {self.d}, but descriptors have {descriptors.shape[1]}",
            )
        return normalize(descriptors[:, : self.d])

    def cut(self, gathered: Gathered) -> Gathered:
        return gathered.converted(self.prefix)

    def undo_cut(self, gathered: Gathered, value: LossValue) -> LossValue:
        """Return the loss with the gradient of the full descriptors, given that of the cut ones."""
        # With p the first d numbers and u = p / |p|, du/dp = (1 - u uᵀ) / |p|: the part of the
        # gradient along u goes.
        full = gathered.descriptors[gathered.own]
        unit = self.prefix(full)
        length = full[:, : self.d].norm(dim=1, keepdim=True).clamp(min=1e-12)
        gradient = value.gradient - (value.gradient * unit).sum(1, keepdim=True) * unit
        return value._replace(gradient=pad(gradient / length, (0, full.shape[1] - self.d)))


class CounterOfPrefix(Counter):
    """Count arriving descriptors for a Matryoshka loss, by their first d numbers alone."""

    def __init__(self, loss: OfPrefix, counter: Counter) -> None:
        super().__init__(loss, counter.budget)
        self._prefix = loss
        self._counter = counter

    def add(self, descriptors: DescriptorRows, labels: LabelRows, is_own: FlagRows) -> None:
        super().add(descriptors, labels, is_own)
        self._counter.add(self._prefix.prefix(descriptors), labels, is_own)

    def value_and_gradient(self, gathered: Gathered) -> LossValue:
        return self._prefix.undo_cut(
            gathered, self._counter.value_and_gradient(self._prefix.cut(gathered))
        )
