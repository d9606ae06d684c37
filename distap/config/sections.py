"""The sections of a recipe, each with its keys, their meaning and their defaults."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.registry import REGISTRY, SOURCES, Chosen, name_of
from distap.storage.locations import Source, parse_source, parse_store

PrecisionName = Literal["float32", "bf16", "fp16"]
Unit = Literal["steps", "epochs"]  # an epoch is as many images as there are to train on


class Section(BaseModel):
    """A section of a recipe: it refuses unknown keys and later changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def sections_in(annotation: Any) -> Iterator[type]:
    """Yield the sections that a type is made of, such as those in a union or a mapping."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def _parsed(parse: Callable[[str], object]) -> Callable[[object], str | Source]:
    """Normalise a text by parsing it; keep a data set in Python as it is."""

    def check(value: object) -> str | Source:
        if isinstance(value, Source):
            return str(value) if value.rows is None else value
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be a valid string")
        try:
            return str(parse(value))
        except DistapError as error:
            raise ValueError(str(error)) from error

    return check


Shards = Annotated[str | Source, PlainValidator(_parsed(parse_source)), PlainSerializer(str)]
SizingText = Annotated[str, AfterValidator(_parsed(Sizing.parse))]
StoreURL = Annotated[str, AfterValidator(_parsed(parse_store))]
Blocks = Annotated[dict[Literal["blocks"], int], Field(min_length=1)]


class MemorySection(Section):
    """Descriptors of earlier steps to add to the gallery, without gradient."""

    size: NonNegativeInt = 0
    """Number of descriptors to remember; 0 remembers none."""
    after: NonNegativeInt = 0
    """Start to remember after this many steps, because descriptors change too fast at first."""


class RankSection(Section):
    """Stage two: compute the loss of the global batch and the gradient of each descriptor."""

    mode: Literal["sharded", "central"] = "sharded"
    """Compute the ranking on all ranks, each for its own queries (sharded), or on rank 0
    (central)."""
    shard_classes: Literal["auto"] | bool = "auto"
    """Let each rank hold the proxies of its part of the classes alone, with their gradient and
    moments (true), or all of them (false); auto shards a loss of more than 30,000 classes, if mode
    is sharded and the optimiser is one of timm."""


class DescribeSection(Section):
    """Stage one: describe each image without a graph."""

    size: PositiveInt | None = None
    """Number of images in a micro-batch of this stage, which keeps no activations; null takes
    replay.size. Another size is refused with dropout, stochastic depth and model.batchnorm:
    batch."""


class ReplaySection(Section):
    """Stage three: describe each image again with a graph, for its gradient."""

    size: PositiveInt = 16
    """Number of images in a micro-batch of this stage, and of describe unless describe.size says
    otherwise, which sets the peak memory; halved if memory runs out."""
    keep: NonNegativeInt | Literal["auto"] = 0
    """Number of a rank's micro-batches that keep their graph from describe; auto takes half of the
    memory that is free after a step. If model.freeze is backbone, 0 means auto."""
    skip_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Skip the replay of images whose descriptor gradient is at most this times the longest one."""
    max_drift: PositiveFloat | None = None
    """Stop if describe and replay differ by more in an image; null takes 1e-4, 1e-3 with TF32, or
    0.1 below float32."""


class StepSection(Section):
    """Settings of all three stages of a step."""

    fold_batchnorm: bool = False
    """Compute frozen BatchNorm in the convolution before it."""
    max_not_finite: PositiveInt = 5
    """Stop after this many steps in a row with a loss or gradient that is not finite. In fp16 a
    gradient counts only at the smallest loss scale."""


class GroupSettings(Section):
    """Learning rate and weight decay of one part of the network."""

    factor: NonNegativeFloat = 1.0
    """Factor on the learning rate of this part."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices and kernels; biases, scales and the pooling's power never decay."""


class OptimizerSection(Section):
    """The optimiser. Further keys belong to the optimiser that `name` chooses."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate, which the schedule multiplies."""
    clip_norm: PositiveFloat | None = None
    """Clip the gradient to this norm; null never clips."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of a backbone layer divided by that of the layer after it; null is 1."""
    head_only: NonNegativeFloat = 0
    """Do not train the backbone for this long at first, in schedule.unit."""
    backbone: GroupSettings = GroupSettings()
    pooling: GroupSettings = GroupSettings()
    head: GroupSettings = GroupSettings()
    loss: GroupSettings = GroupSettings()
    """Learning rate and weight decay of the loss's own parameters, such as proxies."""
    chosen: Annotated[Any, Chosen("optimizer", otherwise="adam")] = "adam"

    @field_validator("backbone", "pooling", "head")
    @classmethod
    def _moves(cls, settings: GroupSettings, info: ValidationInfo) -> GroupSettings:
        if settings.factor == 0:
            instead = "backbone" if info.field_name == "backbone" else f'["{info.field_name}.*"]'
            raise ValueError(
                "a factor of 0 would still compute gradients and moments; set model.freeze:"
                f" {instead}"
            )
        return settings

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, settings: Any) -> Any:
        if isinstance(settings, str):
            settings = {"name": settings}
        if not isinstance(settings, Mapping):
            raise ValueError("expected a name, or a mapping of keys to values")
        chosen = dict(settings)
        keys = cls.model_fields.keys() - {"chosen"}
        section = {key: chosen.pop(key) for key in settings if key in keys}
        return {"chosen": chosen, **section}

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings = handler(self)
        return settings.pop("chosen") | settings


class CheckpointSection(Section):
    """Checkpoints: how often to write them, how many to keep, and where."""

    every: PositiveInt = 100
    """Interval between checkpoints; the last step always writes one."""
    unit: Unit = "steps"
    """Unit of checkpoint.every: steps or epochs."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, next to the best by evaluation.best."""
    store: StoreURL | None = None
    """Store checkpoints at this URL, such as s3://bucket/run; hosts then need not share `run`."""


class StopSection(Section):
    """Requests to stop (SIGTERM, SIGINT, SIGHUP): all ranks finish the step and save."""

    grace_seconds: PositiveFloat = 300
    """Seconds from the signal to the end of the process, in which the last checkpoint must be
    written (and uploaded to checkpoint.store). Choose less than the scheduler gives."""


class MetricsSection(Section):
    """The Prometheus endpoint of metrics."""

    port: Annotated[int, Field(ge=1, le=65000)] | None = None
    """Port of local rank 0's metrics; local rank r listens on port + r."""
    address: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""


class LogsSection(Section):
    """Log lines on standard error."""

    format: Literal["text", "json"] = "text"
    """Write text for people, or JSON with one object per line for a log collector."""


class ModelSection(Section):
    """The network: backbone, weights, pooling and projection."""

    backbone: Annotated[Any, Chosen("backbone", otherwise="timm")] = "resnet50"
    """Network without pooling and classifier; a name alone is an architecture of timm."""
    weights: Annotated[Any, Chosen("weights")] = "timm"
    """Source of pretrained weights. For a backbone that is not from timm, the default is random
    weights."""
    pooling: Annotated[Any, Chosen("pooling", otherwise="gem")] = "auto"
    """Pooling of the features of an image into one vector: native is the one that the backbone was
    pretrained with, and auto is native, or gem for a plain CNN."""
    freeze: Literal["backbone"] | Blocks | list[str] | None = None
    """Do not train `backbone`; or {blocks: N}, the first N blocks and the stem (-N: all but the
    last N); or the parameters that a list of patterns names, such as [pooling.power,
    backbone.stem.*]."""
    adapter: Annotated[Any, Chosen("adapter", otherwise="lora")] | None = None
    """Matrices of low rank that are added to those of the backbone's layers, and learn in their
    place."""
    arguments: dict[str, Any] = Field({})
    """Further arguments of timm.create_model, such as {img_size: 448} or {drop_path_rate: 0.1}."""
    layer_norm: bool = False
    """Apply layer normalisation to the pooled vector, as in ROADMAP's code."""
    unit_length: bool = False
    """Scale the pooled vector to length 1 before the projection, which then trains on extracted
    descriptors."""
    projection: PositiveInt | None = None
    """Number of dimensions of a linear layer after pooling; null for no layer."""
    whitening: NonNegativeInt = 0
    """Start the projection with the PCA whitening of this many training images; 0 starts it at
    random."""
    compile: Literal["blocks"] | None = None
    """Compile the `blocks` that a vision transformer repeats by torch.compile, which takes a minute
    at the start; null compiles none."""
    batchnorm: Literal["frozen", "batch"] = "frozen"
    """Normalise BatchNorm layers by the stored statistics (frozen) or by the micro-batch's
    (batch)."""

    @model_validator(mode="before")
    @classmethod
    def _of_timm(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        backbone = settings.get("backbone", "resnet50")
        if isinstance(backbone, str):
            is_of_others = ":" in backbone and not backbone.startswith(SOURCES)
            is_architecture = not is_of_others and backbone not in REGISTRY["backbone"]
            backbone = {"architecture" if is_architecture else "name": backbone}
        is_of_timm = not isinstance(backbone, Mapping) or backbone.get("name", "timm") == "timm"
        if settings.get("arguments") and not is_of_timm:
            raise ValueError(
                "model.arguments are for networks of timm; write other keys beside the backbone's"
                " name"
            )
        return {"weights": "timm" if is_of_timm else "random", **settings, "backbone": backbone}

    @field_serializer("backbone", mode="wrap")
    def _architecture_alone(self, backbone: Any, handler: SerializerFunctionWrapHandler) -> Any:
        settings = handler(backbone)
        alone = settings.get("name", "timm") == "timm" and not settings.get("pixels")
        return settings["architecture"] if alone else settings

    @property
    def architecture(self) -> str:
        """timm's name of the backbone, or "package.module:Class" of another backbone."""
        return str(getattr(self.backbone, "architecture", name_of("backbone", self.backbone)))
