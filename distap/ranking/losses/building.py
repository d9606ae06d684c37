"""Build a loss from its name, a recipe's form, a class or a function."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from pydantic import ValidationError

from distap.errors import DistapError, problems_of
from distap.ranking.loss import Loss
from distap.ranking.losses.function import FunctionLoss
from distap.registry import adapter_of, build_part, sum_in_full

# A name, a mapping of names to weights, a loss, a class of losses, or a function (descriptors,
# labels).
AnyLoss = str | Mapping[str, Any] | Loss | Callable[..., Any]


def build_loss(loss: AnyLoss, **options: Any) -> Loss:
    """Build a loss from its name, a recipe's form, a class or a function.

    A loss of your own is called "package.module:Class".

    Raises:
        DistapError: the loss, the preset, an option or its value is wrong; or a loss was given with
            options.
    """
    if isinstance(loss, Mapping):
        named = {**sum_in_full(loss), **options}
        if "name" not in named:
            raise DistapError(
                "loss.no_name",
                f"loss {dict(loss)}: expected the names of losses with their weights, or `name`",
            )
        return build_loss(str(named.pop("name")), **named)
    if isinstance(loss, str):
        return build_part("loss", loss, **options)
    if isinstance(loss, type):
        if not issubclass(loss, Loss):
            raise DistapError(
                "loss.wrong_kind", f"{loss.__name__} is a class; give an object of it"
            )
        try:
            return adapter_of(loss).validate_python(options)
        except ValidationError as error:
            raise DistapError(
                "recipe.value",
                f"{loss.__name__}: {'; '.join(problems_of(map(dict, error.errors())))}",
            ) from error
    if options:
        raise DistapError(
            "loss.options_of_object",
            f"{loss} is a loss already; options go with names and classes of losses only",
        )
    if isinstance(loss, Loss):
        return loss
    if [*signature(loss).parameters][:2] == ["similarities", "same_class"]:
        raise DistapError(
            "loss.wrong_kind", f"{loss}: a function of similarities needs @distap.loss above it"
        )
    return FunctionLoss(loss)
