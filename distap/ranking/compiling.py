"""Compile elementwise functions where that pays, and run the same functions as they are elsewhere."""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# From about this many pairs a rank, what compiling costs once (some ten seconds) is saved within a hundred steps.
PAYS_FROM_PAIRS = 2**22
TRIALS = 5
logger = logging.getLogger(__name__)

Function = Callable[..., Any]


@functools.cache
def compiled(function: Function, by_hand: Function | None = None) -> Function:
    """A function of tensors and numbers as torch.compile makes it, or as it is if that fails.

    `by_hand` does the same and is used if it is faster. The choice is made for the arguments of the first call.
    """
    chosen: list[Function] = []
    seen: set[tuple[Any, ...]] = set()  # arguments that need no new graph

    def call(*arguments: Any) -> Any:
        kind = tuple((one.shape, one.dtype, one.device) if isinstance(one, Tensor) else one for one in arguments)
        try:
            if kind in seen:
                return chosen[0](*arguments)
            with _one_graph_for_all_sizes():
                if not chosen:
                    chosen.append(_choice(function, by_hand, arguments))
                result = chosen[0](*arguments)
            seen.add(kind)
            return result
        except Exception as error:
            result = function(*arguments)  # if the arguments are at fault, this raises the error that they deserve
            _say_failed(function, error)
            chosen[:] = [function]
            return result

    return call


@contextmanager
def _one_graph_for_all_sizes() -> Iterator[None]:
    """Compile for any sizes: torch would take sizes that are equal once for equal always, and give up silently."""
    # Imported here, since it takes a second that only those who compile should wait.
    import torch._dynamo
    import torch.fx.experimental._config

    shapes, dynamo = torch.fx.experimental._config, torch._dynamo.config
    with shapes.patch(use_duck_shape=False), dynamo.patch(recompile_limit=64):  # type: ignore[attr-defined]
        yield


def _choice(function: Function, by_hand: Function | None, arguments: tuple[Any, ...]) -> Function:
    by_torch = torch.compile(function, dynamic=True)
    if by_hand is None:
        logger.info("ranking: %s is compiled", function.__name__)
        return by_torch
    seconds = [_seconds(candidate, function, arguments) for candidate in (by_hand, by_torch)]
    chosen, name = (by_hand, "a kernel written by hand") if seconds[0] < seconds[1] else (by_torch, "compiled")
    times = f"{1000 * seconds[0]:.2f} ms by hand, {1000 * seconds[1]:.2f} ms compiled"
    logger.info("ranking: %s is %s (%s)", function.__name__, name, times)
    return chosen


def _seconds(candidate: Function, function: Function, arguments: tuple[Any, ...]) -> float:
    """Seconds of a call, or infinity if it fails."""
    from torch.utils.benchmark import Timer

    try:
        candidate(*arguments)
        return Timer("call(*arguments)", globals={"call": candidate, "arguments": arguments}).timeit(TRIALS).median
    except Exception as error:
        _say_failed(function, error)
        return math.inf


def _say_failed(function: Function, error: Exception) -> None:
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    logger.warning("ranking: %s failed when compiled, so it runs slower without: %s", function.__name__, first_line)
