"""Engines: how the replayed gradients of many ranks become one update of the parameters."""

from collections.abc import Callable

from distap.engine.ddp import DDPEngine
from distap.engine.protocol import Engine

ENGINES: dict[str, Callable[..., Engine]] = {"ddp": DDPEngine}

__all__ = ["ENGINES", "DDPEngine", "Engine"]
