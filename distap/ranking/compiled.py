"""Elementwise inner functions, compiled where that pays; the same functions run as they are elsewhere."""

import functools
import logging
import shutil
import time
from collections.abc import Callable
from os import environ
from typing import Any

import torch
from torch import Tensor

# From about this many pairs a rank, what compiling costs once (some ten seconds) is saved within a hundred steps.
PAYS_FROM_PAIRS = 2**22
TRIALS = 5
logger = logging.getLogger(__name__)

Function = Callable[..., Any]


def compiled_if_large(
    function: Function, pairs: int, device: torch.device, kernel: Function | None = None
) -> Function:
    """`function` compiled by torch.compile, or `kernel` where that is faster; itself where neither pays or works.

    Args:
        function: takes tensors and numbers, gives tensors.
        pairs: number of pairs that are ranked in a step.
        device: where the tensors are.
        kernel: written by hand, does the same.
    """
    if pairs < PAYS_FROM_PAIRS or not _can_compile(device.type):
        return function
    return _choice(function, kernel)


@functools.cache
def _can_compile(device_type: str) -> bool:
    if device_type == "cuda":
        return True  # Triton comes with PyTorch
    compiler = environ.get("CXX", "g++")
    found = any(shutil.which(name) for name in (compiler, "clang++", "c++"))
    if not found:
        logger.info("ranking runs uncompiled, several times slower: no C++ compiler (%s) was found", compiler)
    return found


@functools.cache
def _choice(function: Function, kernel: Function | None) -> Function:
    """Chooses at its first call, from the arguments of that call, and says so."""
    chosen: list[Function] = []

    def call(*arguments: Any) -> Any:
        if not chosen:
            chosen.append(_fastest_that_works(function, kernel, arguments))
        return chosen[0](*arguments)

    return call


def _fastest_that_works(function: Function, kernel: Function | None, arguments: tuple[Any, ...]) -> Function:
    candidates = {"compiled": torch.compile(function, dynamic=True)}
    if kernel is not None:
        candidates["a kernel written by hand"] = kernel
    seconds: dict[str, float] = {}
    for name, candidate in candidates.items():
        try:
            candidate(*arguments)
        except Exception as error:
            # If the arguments are at fault, this fails as well, with the error that they deserve.
            function(*arguments)
            logger.warning("ranking: %s cannot be %s: %s", function.__name__, name, _first_line(error))
            continue
        seconds[name] = 0.0 if kernel is None else _median_seconds(candidate, arguments)
    if not seconds:
        logger.warning("ranking: %s runs uncompiled", function.__name__)
        return function
    best = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in seconds.items()) if kernel is not None else ""
    logger.info("ranking: %s is %s%s", function.__name__, best, f" ({times})" if times else "")
    return candidates[best]


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
