"""The recipe of a training: all sections together, and their short forms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from distap.config.images import DataSection, DescribingSection, EvaluationSection, ImagesSection
from distap.config.sections import (
    AverageSection,
    CheckpointSection,
    DescribeSection,
    LogsSection,
    MemorySection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    RankSection,
    ReplaySection,
    Section,
    StepSection,
    StopSection,
)
from distap.registry import Chosen, Part, name_of, sum_in_full

LOADER_CHUNK = 16  # images that a worker hands over at once if micro-batches are `auto`


PrecisionName = Literal["float32", "bf16"]
DeviceName = Literal["auto", "cuda", "cpu"]


class NetworkRecipe(Section):
    """The part of a recipe that a trained network needs: its construction, and the size of its images."""

    seed: NonNegativeInt = 0
    """Seed of everything random: weights, batches, augmentation."""
    model: ModelSection = Field(default_factory=dict)
    data: ImagesSection = ImagesSection()
    evaluation: DescribingSection = DescribingSection()

    @property
    def sizing(self) -> str:
        """Scaling of images in evaluations, as text for `Sizing.parse`."""
        return self.evaluation.sizing or f"crop {self.data.image_size}"


class Recipe(NetworkRecipe):
    """A recipe: the settings of one training."""

    run: Path
    """Folder of the run: recipe, metrics, checkpoints."""
    steps: PositiveInt | None = None
    """Length of the training in steps. Set this or epochs."""
    epochs: Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None = None
    """Length of the training in epochs of the images. Set this or steps."""
    device: DeviceName = "auto"
    """Train on cuda or cpu; auto takes GPUs where torch sees them, else the CPU."""
    engine: Annotated[Any, Chosen("engine", otherwise="ddp")] = "ddp"
    """Engine by which ranks share the network: a copy on each rank, or shards."""
    precision: PrecisionName = "float32"
    """Precision of the network's computations; parameters stay float32."""
    timeout_seconds: PositiveFloat = 600
    """Time limit of each communication between ranks, seconds."""
    data: DataSection
    sampling: Annotated[Any, Chosen("sampling", otherwise="random")] = "random"
    """Sampling that draws the images of each global batch."""
    loss: Annotated[Any, Chosen("loss", otherwise="ap_q")] = "ap_q"
    """Ranking loss; a sum is written as {sup_ap: 0.5, calibration: 0.5}."""
    memory: MemorySection = MemorySection()
    describe: DescribeSection = DescribeSection()
    rank: RankSection = RankSection()
    replay: ReplaySection = ReplaySection()
    step: StepSection = StepSection()
    optimizer: OptimizerSection = Field(default_factory=dict)
    schedule: Annotated[Any, Chosen("schedule", otherwise="linear")] = "linear"
    """Schedule of the learning rate over the steps."""
    ema: AverageSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: MetricsSection = MetricsSection()
    logs: LogsSection = LogsSection()
    loggers: dict[str, Annotated[Any, Chosen("logger")]] = Field({})
    """Loggers next to Prometheus and the run folder, by name: `loggers: {tensorboard: {}}`."""

    @field_validator("loss", mode="before")
    @classmethod
    def _sum_in_full(cls, loss: Any) -> Any:
        return sum_in_full(loss)

    @field_validator("loggers", mode="before")
    @classmethod
    def _each_by_name(cls, loggers: Any) -> Any:
        if isinstance(loggers, str):
            return {loggers: {"name": loggers}}
        if not isinstance(loggers, Mapping):
            return loggers
        given = {name: keys for name, keys in loggers.items() if keys is not None}
        return {name: {**keys, "name": name} if isinstance(keys, Mapping) else keys for name, keys in given.items()}

    @property
    def loader_chunk(self) -> int:
        """Number of images that a loader worker hands over at once: a micro-batch, if its size is known."""
        return next((size for size in (self.describe.size, self.replay.size) if isinstance(size, int)), LOADER_CHUNK)

    @property
    def keep(self) -> int | Literal["auto"]:
        """Number of micro-batches that keep their graph; of a frozen backbone, as many as fit, and all are small."""
        return self.replay.keep or ("auto" if self.model.freeze == "backbone" else 0)

    @property
    def run_id(self) -> str:
        """Name of the run in log lines and loggers."""
        return self.run.resolve().name

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        """Refuse combinations that cannot work; a part chosen by name may still be an unbuilt `Part`."""
        if (self.steps is None) == (self.epochs is None):
            given = "neither is set" if self.steps is None else f"steps is {self.steps} and epochs {self.epochs:g}"
            raise ValueError(f"set either steps or epochs; {given}")
        reading, sampling = name_of("source", self.data.reading), name_of("sampling", self.sampling)
        if reading == "streamed" and sampling != "random":
            raise ValueError(
                f"data.reading is streamed, which gives images in the order of the shards, but sampling.name is "
                f"{sampling}; set it to random, or data.reading to indexed"
            )
        if name_of("engine", self.engine) == "deepspeed":
            self._fits_deepspeed()
        is_alone = self.model.projection is not None and self.model.adapter is None
        if self.data.is_described and not (is_alone and name_of("engine", self.engine) == "ddp"):
            raise ValueError(
                "data.train holds descriptors, which train model.projection alone: set it, leave model.adapter out, "
                "and set engine to ddp"
            )
        if self.model.adapter is not None and self.optimizer.layer_decay is not None:
            raise ValueError(
                "optimizer.layer_decay is set, but adapters stand in no layer that timm knows: leave it out, or "
                "model.adapter"
            )
        asked = next((key for key in ("every", "also") if getattr(self.evaluation, key)), None)
        if asked and self.data.validation is None:
            raise ValueError(f"evaluation.{asked} is set, but data.validation names no data set")
        return self

    def _fits_deepspeed(self) -> None:
        keys = self.engine.keys if isinstance(self.engine, Part) else vars(self.engine)
        for key, value in (("step.fold_batchnorm", self.step.fold_batchnorm), ("ema", self.ema)):
            if value and keys.get("stage") == 3:
                raise ValueError(
                    f"{key} needs all parameters on every rank, but stage 3 of deepspeed shares them out; leave "
                    f"{key} out, or set engine.stage to 2 or engine to fsdp"
                )
        if self.optimizer.head_only:
            raise ValueError(
                "optimizer.head_only is set, but deepspeed moves all parameters in each step; set it to 0, or "
                "engine to ddp or fsdp"
            )
