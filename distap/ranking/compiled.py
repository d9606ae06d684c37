"""Elementwise inner functions, compiled where that pays; the same functions run as they are elsewhere."""

import functools
import logging
import shutil
from collections.abc import Callable
from os import environ
from typing import Any

import torch

# From about this many pairs a rank, what compiling costs once (some ten seconds) is saved within a hundred steps.
PAYS_FROM_PAIRS = 2**22
logger = logging.getLogger(__name__)

Function = Callable[..., Any]


def compiled_if_large(function: Function, pairs: int, device: torch.device) -> Function:
    """`function` compiled by torch.compile, or itself where that would not pay or not work.

    Args:
        function: takes tensors and numbers, gives tensors.
        pairs: number of pairs that are ranked in a step.
        device: where the tensors are.
    """
    if pairs < PAYS_FROM_PAIRS or not _can_compile(device.type):
        return function
    return _compiled(function)


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
def _compiled(function: Function) -> Function:
    """`function`, compiled at its first call; where that fails, as it is from then on."""
    fast = torch.compile(function, dynamic=True)
    use: list[Function] = []

    def call(*arguments: Any) -> Any:
        if use:
            return use[0](*arguments)
        try:
            result = fast(*arguments)
        except Exception as error:
            # If the arguments are at fault, this fails as well, with the error that they deserve.
            result = function(*arguments)
            logger.warning("ranking: %s runs uncompiled: %s", function.__name__, _first_line(error))
            use.append(function)
            return result
        logger.info("ranking: %s is compiled", function.__name__)
        use.append(fast)
        return result

    return call


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
