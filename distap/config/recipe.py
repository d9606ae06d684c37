"""The recipe of a training: all sections together, and what may be written shorter."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from distap.config.sections import (
    CheckpointSection,
    DataSection,
    DescribeSection,
    EvaluationSection,
    LoggersSection,
    LogsSection,
    MemorySection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    RankSection,
    ReplaySection,
    Section,
    SingleLoss,
    StepSection,
    StopSection,
    SumOfLosses,
)
from distap.data.sampling import ClassesSampling, PByKSampling, RandomSampling, StreamsSampling, SuperPByKSampling
from distap.engine import DDPSettings, DeepSpeedSettings, FSDPSettings, PrecisionName
from distap.ranking import (
    LOSSES,
    Loss,
    QuantizedAP,
    WeightedSum,
    suggestion,
    with_preset,
)

FLOAT32_DRIFT, LOWER_PRECISION_DRIFT = 1e-3, 0.1
LOADER_CHUNK = 16  # images that a worker hands over at once, where micro-batches find their size themselves


class Recipe(Section):
    """One training."""

    run: Path = Field(description="folder of the run: configuration, metrics, checkpoints")
    seed: int = Field(0, ge=0)
    steps: PositiveInt
    engine: Annotated[DDPSettings | FSDPSettings | DeepSpeedSettings, Field(discriminator="name")] = DDPSettings()
    precision: PrecisionName = Field("float32", description="what the network computes in; parameters stay float32")
    timeout_seconds: PositiveFloat = Field(600, description="a collective that takes longer fails")
    data: DataSection
    sampling: Annotated[
        RandomSampling | ClassesSampling | PByKSampling | SuperPByKSampling | StreamsSampling,
        Field(discriminator="name"),
    ] = RandomSampling()
    model: ModelSection = ModelSection()
    loss: Annotated[SingleLoss | SumOfLosses, Field(discriminator="name")] = QuantizedAP()
    memory: MemorySection = MemorySection()
    describe: DescribeSection = DescribeSection()
    rank: RankSection = RankSection()
    replay: ReplaySection = ReplaySection()
    step: StepSection = StepSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: MetricsSection = MetricsSection()
    logs: LogsSection = LogsSection()
    loggers: LoggersSection = LoggersSection()

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_in_full(cls, loss: Any) -> Any:
        """What may be written shorter: a name alone, a preset, a sum as losses with their weights."""
        if isinstance(loss, str):
            return {"name": loss}
        if not isinstance(loss, dict) or loss.get("name") == "sum":
            return loss
        if "name" in loss or not loss.keys() & LOSSES.keys():
            return with_preset({"name": "ap_q", **loss})
        return {"name": "sum", "terms": {name: _term(name, value) for name, value in loss.items()}}

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_in_full(cls, engine: Any) -> Any:
        return {"name": engine} if isinstance(engine, str) else engine

    @property
    def listwise_loss(self) -> Loss:
        """What stage two computes."""
        if isinstance(self.loss, SumOfLosses):
            return WeightedSum(tuple((term.weight, term.loss) for term in self.loss.terms.values()))
        return self.loss

    @property
    def loader_chunk(self) -> int:
        """Images that a loader worker hands over at once: where that is known, as many as the network asks for."""
        return next((size for size in (self.describe.size, self.replay.size) if isinstance(size, int)), LOADER_CHUNK)

    @property
    def run_id(self) -> str:
        """What the run is called in log lines and loggers."""
        return self.logs.run_id or self.run.resolve().name

    @property
    def max_drift(self) -> float:
        """Greatest tolerated difference between an image's two descriptors."""
        if self.replay.max_drift is not None:
            return self.replay.max_drift
        precisions = {self.precision, self.describe.precision or self.precision}
        return FLOAT32_DRIFT if precisions == {"float32"} else LOWER_PRECISION_DRIFT

    @model_validator(mode="after")
    def _reading_is_possible(self) -> "Recipe":
        data = self.data
        if data.train.startswith("pipe:") and not (data.allow_pipes and data.reading == "streamed"):
            raise ValueError(
                f"data.train: {data.train}: pipe: runs a shell command, which needs data.allow_pipes: true and "
                "data.reading: streamed"
            )
        if data.reading == "streamed" and self.sampling.name != "streams":
            raise ValueError(
                f"data.reading is streamed, which gives images in the order of the shards, but sampling.name is "
                f"{self.sampling.name}; set it to streams, or data.reading to indexed"
            )
        return self

    @model_validator(mode="after")
    def _engine_allows_it(self) -> "Recipe":
        engine = self.engine
        if engine.name == "deepspeed" and engine.stage == 3:
            for key, value in (
                ("describe.fold_batchnorm", self.describe.fold_batchnorm),
                ("step.compile", self.step.compile),
            ):
                if value:
                    raise ValueError(
                        f"{key} needs all parameters on every rank, but stage 3 of deepspeed shares them out; set it "
                        "to false, engine.stage to 2 or engine to fsdp"
                    )
        return self

    @model_validator(mode="after")
    def _evaluation_has_images(self) -> "Recipe":
        if self.evaluation.every and self.data.validation is None:
            raise ValueError("evaluation.every is set, but data.validation names no data set")
        return self


def _term(name: str, value: Any) -> dict[str, Any]:
    """A loss of a sum, from its weight alone or from its weight and options."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; {suggestion(name, LOSSES)}")
    options = dict(value) if isinstance(value, dict) else {"weight": value}
    weight = options.pop("weight", 1.0)
    return {"weight": weight, "loss": with_preset({"name": name, **options})}
