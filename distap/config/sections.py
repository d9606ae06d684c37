"""The sections of a recipe, each with its keys, their meaning and their defaults."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    model_validator,
)

from distap.config.validation import ChoosingSection, Remote, Section, Shards, StoreURL, TrainShards
from distap.data.settings import CacheSettings, PixelSettings
from distap.engine.settings import GroupSettings, PrecisionName
from distap.registry import REGISTRY, Chosen, name_of, unknown_key
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings


class ImagesSection(Section):
    """The images as evaluation sees them: what a trained network needs of the data section."""

    validation: Shards | None = Field(None, description="Shards to evaluate on; null evaluates nothing.")
    validation_index: Path | None = Field(None, description="Index of the validation shards, if not beside them.")
    remote: Remote = Field(RemoteSettings(), description="Retries, time-outs and options of remote reads.")
    cache: CacheSettings | None = Field(None, description="Keep shards on each host's own disk; null keeps none.")
    image_size: PositiveInt = Field(224, description="Width and height of the network's input, pixels.")
    workers: int = Field(2, ge=0, description="Reader processes of each rank; 0 reads in the rank itself.")
    max_pixels: PositiveInt = Field(100_000_000, description="Refuse images with more pixels without decoding them.")
    scaled_decoding: bool = Field(True, description="Decode JPEG at 1/2, 1/4 or 1/8 scale if a crop allows it.")

    @property
    def validation_source(self) -> Source | None:
        return parse_source(self.validation, self.validation_index) if self.validation else None


class DataSection(ImagesSection):
    """The images: their places, and how to read them."""

    train: TrainShards = Field(description="Shards to train on: a folder, a pattern or a URL.")
    train_index: Path | None = Field(None, description="Index of the training shards, if not beside them.")
    reading: Annotated[Any, Chosen("source")] = Field(
        "indexed",
        description="`indexed` reads image by image; `streamed` reads shard by shard, with weaker promises.",
    )
    allow_pipes: bool = Field(False, description="Allow `train: pipe:COMMAND`, which runs a shell command.")
    unseen_classes: bool = Field(True, description="Refuse a validation set that shares a class with training.")
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] = "crop_flip_colour"
    prefetch: PositiveInt = Field(4, description="Micro-batches that each worker reads ahead.")
    pixels: PixelSettings = Field(PixelSettings(), description="Where pixels wait between describe and replay.")
    max_damaged: float = Field(
        0.05, ge=0, le=1, description="Stop when more than this share of images is damaged (10 are always tolerated)."
    )
    max_damaged_in_step: float = Field(
        0.25, ge=0, le=1, description="Stop when more than this share of one global batch is damaged."
    )

    @property
    def train_source(self) -> Source:
        return parse_source(self.train, self.train_index, self.allow_pipes)


class ModelSection(Section):
    """The network."""

    backbone: Annotated[Any, Chosen("backbone", otherwise="timm")] = Field(
        "resnet50", description="A name alone is an architecture of timm."
    )
    weights: Annotated[Any, Chosen("weights")] = Field(
        "timm", description="Pretrained weights; a backbone from elsewhere starts with random ones by default."
    )
    pooling: Annotated[Any, Chosen("pooling", otherwise="gem")] = "gem"
    projection: PositiveInt | None = Field(None, description="Dimensions of a linear layer; null for no layer.")
    batchnorm: Literal["frozen", "batch"] = Field("frozen", description="Normalise by fixed or by batch statistics.")
    drop_rate: float = Field(0.0, ge=0, lt=1, description="Probability of dropout.")
    drop_path_rate: float = Field(0.0, ge=0, lt=1, description="Greatest probability of stochastic depth.")

    @model_validator(mode="before")
    @classmethod
    def _of_timm(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        backbone = settings.get("backbone", "resnet50")
        if isinstance(backbone, str):
            is_architecture = ":" not in backbone and backbone not in REGISTRY["backbone"]
            backbone = {"architecture" if is_architecture else "name": backbone}
        is_of_timm = not isinstance(backbone, Mapping) or backbone.get("name", "timm") == "timm"
        return {"weights": "timm" if is_of_timm else "random", **settings, "backbone": backbone}

    @field_serializer("backbone", mode="wrap")
    def _architecture_alone(self, backbone: Any, handler: SerializerFunctionWrapHandler) -> Any:
        settings = handler(backbone)
        return settings["architecture"] if settings.get("name", "timm") == "timm" else settings

    @property
    def architecture(self) -> str:
        """timm's name of the backbone, or the place of a class from elsewhere."""
        return str(getattr(self.backbone, "architecture", name_of("backbone", self.backbone)))


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
    fold_batchnorm: bool = Field(False, description="Fold frozen BatchNorm into the convolutions before it.")


class RankSection(Section):
    """Stage two: the loss of the global batch and the gradient of each descriptor."""

    mode: Literal["sharded", "central"] = Field(
        "sharded", description="Rank on all ranks (sharded), or on rank 0 (central)."
    )
    memory_bytes: PositiveInt | None = Field(
        None, description="Bytes that ranking may use beside the descriptors; null chooses by the device."
    )
    overlap: bool = Field(
        True, description="Gather and count descriptors while the network describes further images."
    )


class ReplaySection(Section):
    """Stage three: every image again, with a graph, to send its descriptor's gradient back."""

    size: PositiveInt | Literal["auto"] = Field(
        16, description="Images in a micro-batch, which decide the peak memory; auto finds the fastest that fits."
    )
    keep: NonNegativeInt | Literal["auto"] = Field(
        0, description="Micro-batches of a rank that keep their graph from describe, or auto."
    )
    skip_below: float = Field(
        0.0,
        ge=0,
        description="Skip the replay of images whose descriptor gradient is at most this times the longest one.",
    )
    max_drift: PositiveFloat | None = Field(
        None, description="Stop if an image's two descriptors differ by more; null takes 1e-3, or 0.1 below float32."
    )


class StepSection(Section):
    """The step as a whole."""

    compile: bool = Field(False, description="Compile the backbone for describe and replay.")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, slower."
    )
    max_not_finite: PositiveInt = Field(
        5, description="Stop after this many steps in a row with a loss or gradient that is not finite."
    )


class OptimizerSection(ChoosingSection):
    """How the parameters move. Keys that are not listed here belong to the optimiser that `name` chooses."""

    learning_rate: PositiveFloat = Field(1e-4, description="The schedule multiplies it.")
    clip_norm: PositiveFloat | None = Field(None, description="Greatest norm of the gradient; null never clips.")
    backbone: GroupSettings = GroupSettings()
    pooling: GroupSettings = GroupSettings()
    head: GroupSettings = GroupSettings()
    chosen: Annotated[Any, Chosen("optimizer", otherwise="adam")] = "adam"

    @classmethod
    def choice(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for key, value in settings.items():
            if difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.8):  # a slip in one of our own keys
                wrong = unknown_key(key, value, [name for name in cls.model_fields if name != "chosen"])
                raise ValidationError.from_exception_data("optimizer", [wrong])
        return settings


class CheckpointSection(Section):
    """Checkpoints: how often, how many, and where."""

    every: PositiveInt = Field(100, description="Steps between checkpoints; the last step always writes one.")
    keep: PositiveInt = Field(2, description="Keep this many of the newest checkpoints.")
    keep_best: bool = Field(True, description="Keep the checkpoint with the highest validation mAP as well.")
    store: StoreURL | None = Field(
        None, description="Store checkpoints at this URL, such as s3://bucket/run; hosts then need not share `run`."
    )
    remote: Remote | None = Field(
        None, description="Retries, time-outs and options of the store; null takes data.remote."
    )


class StopSection(Section):
    """Requests to stop (SIGTERM, SIGINT, SIGHUP): all ranks finish the step, write a checkpoint and leave."""

    grace_seconds: PositiveFloat = Field(
        300,
        description="Seconds from the signal to the end of the process, in which the last checkpoint must be written "
        "(and uploaded to checkpoint.store). Choose less than the scheduler gives.",
    )


class SizedSection(Section):
    """How evaluation brings images to size; without any of these keys it crops the largest square."""

    resize: PositiveInt | None = Field(
        None, description="Scale the shorter side to this many pixels before cropping; null crops the largest square."
    )
    crop: PositiveInt | None = Field(None, description="Side of the crop, pixels; null takes data.image_size.")
    max_side: PositiveInt | None = Field(
        None, description="Take whole images, the longer side at most this many pixels."
    )
    original: bool = Field(False, description="Take whole images at their original size.")

    @model_validator(mode="after")
    def _one_way(self) -> "SizedSection":
        ways = {"resize or crop": self.resize or self.crop, "max_side": self.max_side, "original": self.original}
        if len(given := [key for key, value in ways.items() if value]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        return self

    def sizing(self, image_size: int) -> str:
        """As `distap.data.images.whole_images.Sizing` writes it; `image_size` is data.image_size."""
        if self.original or self.max_side is not None:
            return "original" if self.original else f"side {self.max_side}"
        resize = "" if self.resize is None else f"resize {self.resize} "
        return f"{resize}crop {self.crop or image_size}"


class DescribingSection(SizedSection):
    """The part of the evaluation section that describing images needs."""

    scales: tuple[PositiveFloat, ...] = Field(
        (1.0,), min_length=1, description="Describe each image at these scales."
    )
    batch_size: PositiveInt = Field(64, description="Images described at once.")


class EvaluatedSet(SizedSection):
    """A data set to evaluate on beside data.validation; images are taken as there unless a key says otherwise."""

    data: str = Field(description="Shards, or a folder with a ground truth that `distap data convert` wrote.")
    distractors: tuple[str, ...] = Field((), description="Shards to add to the gallery of a ground truth.")
    scales: tuple[PositiveFloat, ...] | None = Field(
        None, min_length=1, description="Describe each image at these scales; null takes evaluation.scales."
    )

    def within(self, evaluation: DescribingSection) -> DescribingSection:
        """How images of this set are described."""
        says = self.original or any((self.resize, self.crop, self.max_side))
        own = self.model_dump(include=set(SizedSection.model_fields)) if says else {}
        return evaluation.model_copy(update=own | ({} if self.scales is None else {"scales": self.scales}))


class EvaluationSection(DescribingSection):
    """Evaluation during training, on data.validation and on other sets."""

    every: int | None = Field(
        None, ge=0, description="Steps between evaluations; null evaluates first and last, 0 never."
    )
    at_start: bool = Field(True, description="Evaluate before the first step too, to show what training gains.")
    also: dict[str, EvaluatedSet] = Field(
        {}, description="Other data sets, by the name under which their figures appear."
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
    run_id: str | None = Field(
        None, description="Name of the run in log lines and loggers; null takes the run folder's name."
    )


class LoggersSection(ChoosingSection):
    """Loggers beside Prometheus and the run folder, by name: `loggers: {tensorboard: {}}`."""

    chosen: dict[str, Annotated[Any, Chosen("logger")]] = Field({}, description="Each logger's keys, by its name.")
    lines: PositiveInt = Field(1000, description="Lose further lines when this many wait for a slow logger.")
    close_seconds: PositiveFloat = Field(30, description="Wait this long for loggers to finish after the last step.")

    @classmethod
    def named(cls, name: str) -> dict[str, Any]:
        return {name: {}}

    @classmethod
    def choice(cls, settings: dict[str, Any]) -> dict[str, Any]:
        given = {name: keys for name, keys in settings.items() if keys is not None}
        return {name: {**keys, "name": name} if isinstance(keys, Mapping) else keys for name, keys in given.items()}
