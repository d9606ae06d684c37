"""Compile elementwise functions where that is faster; run them uncompiled elsewhere."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from distap.errors import logger

F = TypeVar("F", bound=Callable[..., Any])
# From about this many pairs per rank, what compiling costs once (some ten seconds) is saved within
# a hundred steps. Histograms on a GPU need 16 times as many pairs, and a thousand steps (an H100
# saves 14 ms of 22 then).
PAYS_FROM_PAIRS = 2**22
ON_GPU = 16


def uncompiled(function: F) -> F:
    """Let a function run as it is inside what the caller compiles by torch.compile.

    Ranking compiles its own loops; a compiled network around it is enough.
    """
    return cast(F, torch.compiler.disable(function))


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors and numbers; call it uncompiled if that fails."""
    # Indices come from codes of our own: to check each would take as long as to look it up.
    chosen = torch.compile(function, dynamic=True, options={"assert_indirect_indexing": False})
    seen: set[tuple[Any, ...]] = set()  # arguments that need no new graph
    logger.info("ranking: %s is compiled", function.__name__)

    def call(*arguments: Any) -> Any:
        nonlocal chosen
        kind = tuple(
            (argument.shape, argument.stride(), argument.type())
            if isinstance(argument, Tensor)
            else argument
            for argument in arguments
        )
        try:
            # Changing torch's settings takes as long as a small tile, so only a new kind of
            # arguments changes them.
            if kind in seen:
                return chosen(*arguments)
            # Imported here, since it takes a second that only those who compile should wait.
            import torch._dynamo
            import torch.fx.experimental._config

            # One graph for all sizes: torch would take sizes that are once equal for always equal,
            # and give up silently after some graphs.
            shapes = torch.fx.experimental._config
            dynamo = torch._dynamo.config
            with shapes.patch(use_duck_shape=False), dynamo.patch(recompile_limit=64):  # type: ignore[attr-defined]
                result = chosen(*arguments)
            seen.add(kind)
            return result
        # Compilers fail in many ways (none installed, a full disk, an operation unknown to them),
        # at the first call or with a new size, and a training must not end by that.
        except Exception as error:
            # If the arguments are at fault, this raises the error that they deserve.
            result = function(*arguments)
            logger.warning(
                "ranking: %s failed when compiled, so it runs slower without: %s",
                function.__name__,
                f"{type(error).__name__}: {error}".partition("\n")[0],
            )
            chosen = function
            return result

    return call
