"""Make a loss from a function: `@distap.loss` for one with settings, or any function in place of a
loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar

from torch import Tensor, nn

from distap.ranking.loss import Loss
from distap.ranking.losses.base import DescriptorLoss, Mask, Scores, SimilarityLoss


def loss(function: Callable[..., Tensor]) -> type[Loss]:
    """Make a listwise loss from a function; its further parameters become settings if they have a
    default.

        @distap.loss
        def hinge(similarities, same_class, margin=0.1):
            hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True) return
            ((hardest - similarities + margin).clamp(min=0) * same_class).sum(1) / same_class.sum(1)

        Multistage(network, loss=hinge(margin=0.2))     # in a recipe: loss: {name:
        "my_package:hinge", margin: 0.2}

    Args:
        function: of `similarities` (r, N-1) of r queries to all images but themselves, and
            `same_class` (r, N-1) bool, with at least one True per row; it returns the loss of each
            query, (r,), and is called for some queries at a time, on each rank for its own. Or of
            `descriptors` (B, C) of length 1 and `labels` (B,) of the whole batch; it returns a
            scalar, and rank 0 calls it once. A further parameter without a default takes the rows
            of the `extra` tensor of that name, (r, ...) or (B, ...).
    Returns:
        A class; pass it, or an instance with settings.
    Raises:
        TypeError: the function takes neither (similarities, same_class) nor (descriptors, labels)
            first, or a setting is called `weights` or `self_pair`.
    """
    parameters = list(signature(function).parameters.values())
    bases = {"similarities, same_class": _OfSimilarities, "descriptors, labels": _OfDescriptors}
    base = bases.get(", ".join(one.name for one in parameters[:2]))
    if base is None:
        raise TypeError(
            f"{function.__name__} has to take (similarities, same_class) or (descriptors, labels)"
            " first"
        )
    settings = []
    for one in (each for each in parameters[2:] if each.default is not Parameter.empty):
        if one.name in ("weights", "self_pair"):
            raise TypeError(
                f"{function.__name__}: a setting cannot be called {one.name}, which every loss has"
            )
        kind = Any if one.annotation is Parameter.empty else one.annotation
        settings.append((one.name, kind, field(default=one.default)))
    inside = {
        "function": staticmethod(function),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
    }
    made = make_dataclass(
        function.__name__, settings, bases=(base,), namespace=inside, frozen=True, kw_only=True
    )
    made.__qualname__ = function.__qualname__
    return made


class _OfDescriptors(DescriptorLoss):
    function: Any
    formula = ("function", 2)

    def loss(self, descriptors: Tensor, labels: Tensor, **extra: Tensor) -> Tensor:
        value: Tensor = self.function(descriptors, labels, **extra, **_settings(self))
        return value


@dataclass(frozen=True)
class FunctionLoss(_OfDescriptors):
    """Any function of descriptors (B, C) and labels (B,) that returns a scalar; rank 0 calls it for
    all ranks.
    """

    function: Callable[..., Tensor]

    @property
    def given(self) -> Callable[..., Tensor]:
        """Return the function; a run records where it is defined, since it has no name in a
        recipe."""
        return self.function

    @property
    def learned(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None


@dataclass(frozen=True)
class _OfSimilarities(SimilarityLoss):
    self_pair: bool = False
    function: ClassVar[Callable[..., Tensor]]
    formula = ("function", 2)

    def loss(self, similarities: Scores, positive: Mask, negative: Mask, **extra: Tensor) -> Tensor:
        # A user's function need not know of the query's own column: each row has one less than the
        # gallery.
        others = positive | negative
        columns = (each[others].view(len(each), -1) for each in (similarities, positive))
        return self.function(*columns, **extra, **_settings(self))


def _settings(made: Loss) -> dict[str, Any]:
    """Return the fields of the loss that the function takes as arguments."""
    inherited = {"function", *(one.name for one in fields(_OfSimilarities))}
    return {one.name: getattr(made, one.name) for one in fields(made) if one.name not in inherited}
