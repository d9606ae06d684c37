"""Elementwise inner functions, compiled where that pays; the same functions run as they are elsewhere."""

import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import environ
from typing import Any

import torch
from torch import Tensor

# From about this many pairs a rank, what compiling costs once (some ten seconds) is saved within a hundred steps.
PAYS_FROM_PAIRS = 2**22
TRIALS = 5
logger = logging.getLogger(__name__)

Function = Callable[..., Any]


def compiled_if_large(function: Function, pairs: int, like: Tensor, kernel: Function | None = None) -> Function:
    """`function` compiled by torch.compile, or `kernel` where that is faster; itself where neither pays or works.

    Args:
        function: takes tensors and numbers, gives tensors.
        pairs: number of pairs that are ranked in a step.
        like: has the dtype and device of the tensors.
        kernel: written by hand, does the same.
    """
    if pairs < PAYS_FROM_PAIRS:
        _say_once(f"ranking runs uncompiled: compiling pays from {PAYS_FROM_PAIRS:,} pairs a rank, here are fewer")
        return function
    if not _can_compile(like.device.type):
        return function
    return _choice(function, kernel, like.dtype, like.device.type)


@functools.cache
def _can_compile(device_type: str) -> bool:
    if device_type == "cuda":
        return True  # Triton comes with PyTorch
    compiler = environ.get("CXX", "g++")
    found = any(shutil.which(name) for name in (compiler, "clang++", "c++"))
    if not found:
        _say_once(f"ranking runs uncompiled, several times slower: no C++ compiler ({compiler}) was found")
    return found


@functools.cache
def _choice(function: Function, kernel: Function | None, dtype: torch.dtype, device_type: str) -> Function:
    """Chooses at its first call, from the arguments of that call; what fails later is not used again."""
    chosen: list[Function] = []
    seen: set[tuple[Any, ...]] = set()

    def call(*arguments: Any) -> Any:
        if not chosen:
            with _few_graphs():
                chosen.append(_fastest_that_works(function, kernel, arguments))
        kind = tuple(argument.shape if isinstance(argument, Tensor) else argument for argument in arguments)
        try:
            if kind in seen:
                return chosen[0](*arguments)
            with _few_graphs():
                result = chosen[0](*arguments)
            seen.add(kind)
            return result
        except Exception as error:
            # If the arguments are at fault, this fails as well, with the error that they deserve.
            result = function(*arguments)
            _say_failed(function, error)
            chosen[0] = function
            return result

    return call


@contextmanager
def _few_graphs() -> Iterator[None]:
    """Compile one graph for tiles of all sizes, and go on compiling where a few more are needed.

    By default sizes that happen to be equal are taken to be always so, and after eight graphs a function silently
    runs uncompiled.
    """
    # Imported here, since it takes a second that only who compiles should wait.
    import torch._dynamo
    import torch.fx.experimental._config

    shapes, dynamo = torch.fx.experimental._config, torch._dynamo.config
    with shapes.patch(use_duck_shape=False), dynamo.patch(recompile_limit=64):  # type: ignore[attr-defined]
        yield


def _fastest_that_works(function: Function, kernel: Function | None, arguments: tuple[Any, ...]) -> Function:
    compiled = torch.compile(function, dynamic=True)
    if kernel is None:
        _say_once("ranking runs compiled")
        return compiled
    seconds: dict[Function, float] = {}
    for candidate in (compiled, kernel):
        try:
            candidate(*arguments)
            seconds[candidate] = _median_seconds(candidate, arguments)
        except Exception as error:
            _say_failed(function, error)
            seconds[candidate] = math.inf
    best = min(seconds, key=lambda candidate: seconds[candidate])
    _say_once(
        f"ranking: {function.__name__} is {'a kernel written by hand' if best is kernel else 'compiled'} "
        f"({1000 * seconds[kernel]:.2f} ms by hand, {1000 * seconds[compiled]:.2f} ms compiled)"
    )
    return best


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def _say_failed(function: Function, error: Exception) -> None:
    logger.warning(
        "ranking: %s runs uncompiled, since what was compiled failed: %s", function.__name__, _first_line(error)
    )


def _median_seconds(candidate: Function, arguments: tuple[Any, ...]) -> float:
    devices = {argument.device for argument in arguments if isinstance(argument, Tensor) and argument.is_cuda}

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    laps = []
    for _ in range(TRIALS):
        started = now()
        candidate(*arguments)
        laps.append(now() - started)
    return sorted(laps)[TRIALS // 2]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
