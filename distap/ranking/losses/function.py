"""Make a loss from a function: `@distap.loss` for one with settings, or any function as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar

from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.loss import Loss
from distap.ranking.losses.base import DescriptorLoss, Mask, Scores, SimilarityLoss


def loss(function: Callable[..., Tensor]) -> type[Loss]:
    """Make a listwise loss from a function, whose parameters with a default become settings.

        @distap.loss
        def hinge(similarities, same_class, margin=0.1):
            hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True)
            losses = (hardest - similarities + margin).clamp(min=0) * same_class
            return losses.sum(1) / same_class.sum(1)

        Multistage(network, loss=hinge(margin=0.2))

    In a recipe it is `loss: {name: "my_package:hinge", margin: 0.2}`.

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
        DistapError: the function takes neither (similarities, same_class) nor (descriptors, labels)
            first, or a setting is called `weights` or `self_pair`.
    """
    parameters = list(signature(function).parameters.values())
    bases = {"similarities, same_class": _OfSimilarities, "descriptors, labels": _OfDescriptors}
    base = bases.get(", ".join(parameter.name for parameter in parameters[:2]))
    if base is None:
        raise DistapError(
            "loss.wrong_parameters",
            f"{_place(function)} has to take (similarities, same_class) or (descriptors, labels)"
            " first",
        )
    settings = []
    for parameter in parameters[2:]:
        if parameter.default is Parameter.empty:
            continue
        if parameter.name in ("weights", "self_pair"):
            raise DistapError(
                "loss.wrong_parameters",
                f"{_place(function)}: a setting cannot be called {parameter.name}, which every"
                " loss has",
            )
        kind = Any if parameter.annotation is Parameter.empty else parameter.annotation
        settings.append((parameter.name, kind, field(default=parameter.default)))
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


def _place(function: Callable[..., Tensor]) -> str:
    """Return the file, the line and the name of a function of the user's own."""
    code = function.__code__
    return f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__}"


class _OfDescriptors(DescriptorLoss):
    function: Any
    formula = ("function", 2)

    def loss(self, descriptors: Tensor, labels: Tensor, **extra: Tensor) -> Tensor:
        value: Tensor = self.function(descriptors, labels, **extra, **_settings(self))
        return value


@dataclass(frozen=True)
class FunctionLoss(_OfDescriptors):
    """Any function of descriptors (B, C) and labels (B,) to a scalar, called on rank 0 for all."""

    function: Callable[..., Tensor]

    @property
    def given(self) -> Callable[..., Tensor]:
        """The function. A run records where it is defined, since it has no name in a recipe."""
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
        is_other = positive | negative
        count = len(similarities)
        return self.function(
            similarities[is_other].view(count, -1),
            positive[is_other].view(count, -1),
            **extra,
            **_settings(self),
        )


def _settings(made: Loss) -> dict[str, Any]:
    """Return the fields of the loss that the function takes as arguments."""
    inherited = {"function", *(setting.name for setting in fields(_OfSimilarities))}
    names = [setting.name for setting in fields(made) if setting.name not in inherited]
    return {name: getattr(made, name) for name in names}
