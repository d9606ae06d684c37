"""The sections of a recipe, each with its keys, their meaning and their defaults."""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from distap.config.rates import GroupSettings, Unit
from distap.config.validation import Section, StoreURL
from distap.precision import PrecisionName
from distap.registry import Chosen, unknown_key


def _bytes(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)? ?[kMGT]i?B", text):
        raise ValueError("must be a size such as 4GB")
    return text


class MemorySection(Section):
    """Descriptors of earlier steps to rank against as well, without gradient."""

    size: int = Field(0, ge=0, description="Number of descriptors to remember; 0 remembers none.")
    after: int = Field(
        0, ge=0, description="Begin to remember after this many steps; at first descriptors change too fast."
    )


class DescribeSection(Section):
    """Stage one: the descriptors of all images, without a graph."""

    size: PositiveInt | Literal["auto"] | None = Field(
        None, description="Images in a micro-batch; null takes replay.size, auto finds the fastest that fits."
    )
    precision: PrecisionName | None = Field(None, description="Precision of stage one; null takes the recipe's.")


class RankSection(Section):
    """Stage two: the loss of the global batch and the gradient of each descriptor."""

    mode: Literal["sharded", "central"] = Field(
        "sharded", description="Rank on all ranks (sharded), or on rank 0 (central)."
    )
    memory_bytes: int | None = Field(
        None,
        ge=2**20,
        description="Bytes that ranking may use beside the descriptors, 1 MiB or more; null chooses by the device.",
    )


class ReplaySection(Section):
    """Stage three: every image again, with a graph, to send its descriptor's gradient back."""

    size: PositiveInt | Literal["auto"] = Field(
        16, description="Images in a micro-batch, which decide the peak memory; auto finds the fastest that fits."
    )
    keep: NonNegativeInt | Literal["auto"] | Annotated[str, AfterValidator(_bytes)] = Field(
        0,
        description="Micro-batches of a rank that keep their graph from describe; bytes that these may take, such as "
        "4GB; or auto, half of the memory that is free after a step.",
    )
    skip_below: float = Field(
        0.0,
        ge=0,
        description="Skip the replay of images whose descriptor gradient is at most this times the longest one.",
    )
    max_drift: PositiveFloat | None = Field(
        None, description="Stop if an image's two descriptors differ by more; null takes 1e-3, or 0.1 below float32."
    )

    @property
    def budget(self) -> int | None:
        """Bytes that the graphs which `keep` names may take, if it says so."""
        is_given = isinstance(self.keep, str) and self.keep != "auto"
        return TypeAdapter(ByteSize).validate_python(self.keep) if is_given else None


class StepSection(Section):
    """The step as a whole."""

    compile: bool = Field(False, description="Compile the backbone for training and evaluation.")
    fold_batchnorm: bool = Field(
        False, description="Compute frozen BatchNorm in the convolution before it, if the compiler does not."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, slower."
    )
    max_not_finite: PositiveInt = Field(
        5, description="Stop after this many steps in a row with a loss or gradient that is not finite."
    )


class OptimizerSection(Section):
    """How the parameters move. Keys that are not listed here belong to the optimiser that `name` chooses."""

    learning_rate: PositiveFloat = Field(1e-4, description="The schedule multiplies it.")
    clip_norm: PositiveFloat | None = Field(None, description="Greatest norm of the gradient; null never clips.")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="Rate of a layer of the backbone over that of the layer after it; null is 1."
    )
    head_only: NonNegativeFloat = Field(
        0, allow_inf_nan=False, description="Keep the backbone as it is at first; in schedule.unit."
    )
    backbone: GroupSettings = GroupSettings()
    pooling: GroupSettings = GroupSettings()
    head: GroupSettings = GroupSettings()
    loss: GroupSettings = Field(GroupSettings(), description="Of a loss with parameters of its own, such as proxies.")
    chosen: Annotated[Any, Chosen("optimizer", otherwise="adam")] = "adam"

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, settings: Any) -> Any:
        if isinstance(settings, str):
            settings = {"name": settings}
        if not isinstance(settings, Mapping):
            raise ValueError("expected a name, or a mapping of keys to values")
        own = {key: value for key, value in settings.items() if key in cls.model_fields}
        further = {key: value for key, value in settings.items() if key not in own}
        for key, value in further.items():
            if difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.8):  # a slip in one of our own keys
                wrong = unknown_key(key, value, [name for name in cls.model_fields if name != "chosen"])
                raise ValidationError.from_exception_data("optimizer", [wrong])
        return {"chosen": further, **own}

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings = handler(self)
        return settings.pop("chosen") | settings


class CheckpointSection(Section):
    """Checkpoints: how often, how many, and where."""

    every: PositiveInt = Field(100, description="How often; the last step always writes one.")
    unit: Unit = Field("steps", description="Of `every`.")
    keep: PositiveInt = Field(
        2, description="Keep this many of the newest checkpoints, next to the best by validation mAP."
    )
    store: StoreURL | None = Field(
        None, description="Store checkpoints at this URL, such as s3://bucket/run; hosts then need not share `run`."
    )


class AverageSection(Section):
    """An exponential moving average of the parameters, which is evaluated and saved in their place."""

    decay: float = Field(0.999, gt=0, lt=1, description="Weight of the average so far at each step.")


class StopSection(Section):
    """Requests to stop (SIGTERM, SIGINT, SIGHUP): all ranks finish the step, write a checkpoint and leave."""

    grace_seconds: PositiveFloat = Field(
        300,
        description="Seconds from the signal to the end of the process, in which the last checkpoint must be written "
        "(and uploaded to checkpoint.store). Choose less than the scheduler gives.",
    )


class MetricsSection(Section):
    """Prometheus."""

    port: int | None = Field(
        None, ge=1, le=65000, description="Port of local rank 0; local rank r listens on port + r."
    )
    address: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")

    def port_of(self, local_rank: int) -> int | None:
        return None if self.port is None else self.port + local_rank


class LogsSection(Section):
    """Log lines on the standard error."""

    format: Literal["text", "json"] = Field(
        "text", description="Text for people; json, one object a line, for a log collector."
    )
