"""Networks whose parameters have no values, and take no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


@contextmanager
def hollow_parameters() -> Iterator[None]:
    """Keep no values of the parameters of modules that are built inside: they are on `meta`.

    Buffers keep theirs, since many are computed once and stand in no file, such as the frequencies
    of a position embedding.
    """
    register = nn.Module.register_parameter

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Layer by layer, so that no more than one layer has values at a time.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_hollow  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def tried(network: Network) -> Network:
    """Return a network that a pass on the device of its parameters can be tried with.

    One without values is copied to `meta` as a whole, where a pass computes shapes alone.
    """
    is_hollow = any(parameter.is_meta for parameter in network.parameters())
    return deepcopy(network).to("meta") if is_hollow else network
