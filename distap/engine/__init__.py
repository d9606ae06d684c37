"""Engines: how the replayed gradients of many ranks become one update of the parameters."""

from collections.abc import Callable

from distap.engine.ddp import DDPEngine, DDPSettings
from distap.engine.precision import Precision, PrecisionName
from distap.engine.protocol import BuildOptimizer, Engine

ENGINES: dict[str, Callable[..., Engine]] = {"ddp": DDPEngine}

__all__ = ["ENGINES", "BuildOptimizer", "DDPEngine", "DDPSettings", "Engine", "Precision", "PrecisionName"]
