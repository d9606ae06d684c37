"""Engines: how the replayed gradients of many ranks become one update of the parameters."""

from collections.abc import Callable

from distap.engine.ddp import DDPEngine, DDPSettings
from distap.engine.deepspeed.config import DeepSpeedSettings
from distap.engine.deepspeed.engine import DeepSpeedEngine
from distap.engine.fsdp import FSDPEngine, FSDPSettings
from distap.engine.precision import DTYPES, Precision, PrecisionName
from distap.engine.protocol import BuildOptimizer, Engine

ENGINES: dict[str, Callable[..., Engine]] = {"ddp": DDPEngine, "fsdp": FSDPEngine, "deepspeed": DeepSpeedEngine}

__all__ = [
    "DTYPES",
    "ENGINES",
    "BuildOptimizer",
    "DDPEngine",
    "DDPSettings",
    "DeepSpeedEngine",
    "DeepSpeedSettings",
    "Engine",
    "FSDPEngine",
    "FSDPSettings",
    "Precision",
    "PrecisionName",
]
