"""The recipe of a training: the sections about images, and all sections together."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from distap.config import sections
from distap.config.sections import Section, Shards, SizingText, Unit
from distap.data.sizing import PixelSettings
from distap.registry import Chosen, Part, name_of, sum_in_full
from distap.storage.locations import Source, parse_source

PrecisionName = Literal["float32", "bf16"]
DeviceName = Literal["auto", "cuda", "cpu"]
Scales = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


class ImagesSection(Section):
    """Images to evaluate on: the part of the data section that a trained network needs."""

    validation: Shards | None = None
    """Shards to evaluate on; null evaluates nothing."""
    gallery: Shards | None = None
    """Shards to search in for the images of data.validation; null lets these images retrieve each
    other."""
    gallery_draws: NonNegativeInt = 0
    """Draw a gallery of one image per class of data.validation this many times, and query the
    others."""
    image_size: PositiveInt = 224
    """Width and height of the network's input, pixels."""
    workers: NonNegativeInt = 2
    """Number of reader processes of each rank; 0 reads in the rank itself."""


class DataSection(ImagesSection):
    """Training images: where they are, and how to read them."""

    train: Shards
    """Shards to train on: a folder, a pattern or a URL. To train model.projection alone on stored
    descriptors, give described:FOLDER, where FOLDER was written by `distap extract`."""
    reading: Annotated[Any, Chosen("source")] = "indexed"
    """Read single images by the index of the shards (`indexed`), or whole shards one after another
    (`streamed`), which needs no index, but gives the same batches again only for the same numbers
    of ranks and workers."""
    image_sizes: dict[Annotated[float, Field(ge=0, lt=1)], PositiveInt] = Field({})
    """Train on smaller images first: width and height by the share of the steps from which they
    hold, such as {0: 64, 0.7: 96} next to an image_size of 96; none trains at image_size
    throughout."""
    unseen_classes: bool = True
    """Refuse a validation set that shares a class with training."""
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] = (
        "crop_flip_colour"
    )
    """Augmentation: crop and vary training images at random."""
    prefetch: PositiveInt = 4
    """Number of micro-batches that each worker reads ahead."""
    pixels: PixelSettings = PixelSettings()
    """Place where a rank keeps pixels between describe and replay."""
    max_damaged: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Stop when more than this share of images is damaged (10 are always tolerated)."""

    @model_validator(mode="after")
    def _keys_fit(self) -> "DataSection":
        if (self.gallery or self.gallery_draws) and not self.validation:
            raise ValueError(
                "gallery and gallery_draws are for the images of validation, which names none"
            )
        sizes = [size for _, size in self.sizes]
        if sizes != sorted(sizes) or sizes[-1] != self.image_size:
            raise ValueError(
                f"image_sizes: expected sizes that rise to image_size, {self.image_size}, not"
                f" {sizes}"
            )
        return self

    @property
    def train_source(self) -> Source:
        return parse_source(self.train)

    @property
    def sizes(self) -> list[tuple[float, int]]:
        """Sizes of training images, each with the share of the steps from which it holds."""
        return sorted(({0.0: self.image_size} | self.image_sizes).items())

    @property
    def is_described(self) -> bool:
        """Return whether descriptors stand for the training images."""
        return self.train_source.kind == "described"


class DescribingSection(Section):
    """Keys of the evaluation section for describing images."""

    sizing: SizingText | None = None
    """Scale whole images (`side N`: the longer side to N pixels at most; `original`), or crop the
    largest square (`crop N`) or the centre of a scaled image (`resize M crop N`, `resize HxW crop
    N`); null is `crop` of data.image_size."""
    scales: Scales = (1.0,)
    """Describe each image at these scales."""
    antialias: bool = True
    """Smooth images before shrinking them to a scale below 1."""
    dimensions: PositiveInt | None = None
    """Keep this many first dimensions of a descriptor, scaled to length 1 again, for networks that
    the loss `matryoshka` trained; null keeps all."""
    figures: tuple[str, ...] = ()
    """Names of the figures of data.validation, such as [mAP, R@1, R@100]; none takes mAP, mAP@R,
    and R@k and mP@k for k of 1, 5 and 10."""
    batch_size: PositiveInt = 64
    """Number of images that the network describes at once in evaluation. On a CPU at most 8 images
    of 224 px are described at once, whatever the number. Lower it if memory runs out."""
    precision: PrecisionName = "float32"
    """Precision of the network's computations for evaluations and `distap extract`."""


class EvaluatedSet(Section):
    """A data set to evaluate on next to data.validation, scaled alike unless a key differs."""

    data: str
    """Shards, or a folder with a ground truth that `distap data convert` wrote."""
    gallery: str | None = None
    """Shards to search in for the images of `data`; null lets these images retrieve each other."""
    gallery_draws: NonNegativeInt = 0
    """Draw a gallery of one image per class this many times, query the others, and average the
    figures."""
    truth: Path | None = None
    """File that says for each image of `data` which ones are right, as `distap eval --truth` reads
    it."""
    figures: tuple[str, ...] = ()
    """Names of the figures to compute, such as [mAP, R@1, H-AP]; none takes those of the set's
    protocol."""
    sizing: SizingText | None = None
    """Scale images in this way; null takes evaluation.sizing."""
    scales: Scales | None = None
    """Describe each image at these scales; null takes evaluation.scales."""


class EvaluationSection(DescribingSection):
    """Evaluation during training, on data.validation and on other sets."""

    every: NonNegativeInt | None = None
    """Interval between evaluations; null evaluates first and last, 0 never."""
    unit: Unit = "steps"
    """Unit of evaluation.every: steps or epochs."""
    at_start: bool = True
    """Evaluate before the first step too, to show what training gains."""
    also: dict[str, EvaluatedSet] = Field({})
    """Other data sets to evaluate on, by the name under which their figures appear."""


class NetworkRecipe(Section):
    """The part of a recipe that a trained network needs: its construction and its images."""

    seed: NonNegativeInt = 0
    """Seed of everything random: weights, batches, augmentation."""
    # Made when a recipe is read: a section made here would import torch together with this module.
    model: sections.ModelSection = Field(default_factory=dict, validate_default=True)
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
    epochs: PositiveFloat | None = None
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
    loss: Annotated[Any, Chosen("loss", otherwise="ap_q"), BeforeValidator(sum_in_full)] = "ap_q"
    """Ranking loss; a sum is written as {sup_ap: 0.5, calibration: 0.5}."""
    memory: sections.MemorySection = sections.MemorySection()
    rank: sections.RankSection = sections.RankSection()
    replay: sections.ReplaySection = sections.ReplaySection()
    step: sections.StepSection = sections.StepSection()
    optimizer: sections.OptimizerSection = Field(default_factory=dict, validate_default=True)
    schedule: Annotated[Any, Chosen("schedule", otherwise="linear")] = "linear"
    """Schedule of the learning rate over the steps."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the parameters, with this weight of the old one at each
    step, such as 0.999; evaluations and saved networks use it."""
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    stop: sections.StopSection = sections.StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: sections.MetricsSection = sections.MetricsSection()
    logs: sections.LogsSection = sections.LogsSection()
    loggers: tuple[Annotated[Any, Chosen("logger")], ...] = ()
    """Loggers next to Prometheus and the run folder, such as [tensorboard, wandb]."""

    @property
    def keep(self) -> int | Literal["auto"]:
        """Number of micro-batches that keep their graph.

        Behind a frozen backbone graphs are small, so as many are kept as fit.
        """
        return self.replay.keep or ("auto" if self.model.freeze == "backbone" else 0)

    @property
    def run_id(self) -> str:
        """Name of the run in log lines and loggers."""
        return self.run.resolve().name

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        """Refuse combinations of recipe keys that cannot work together.

        A value that a recipe chooses by name may still be an unbuilt `Part`.
        """
        self._require_one_length()
        names = [name_of("logger", chosen) for chosen in self.loggers]
        if len(names) > len(set(names)):
            raise ValueError(f"loggers: one of {', '.join(names)} is there twice")
        self._refuse_reading()
        engine = name_of("engine", self.engine)
        if engine == "deepspeed":
            self._refuse_for_deepspeed()
        trains_alone = self.model.projection is not None and self.model.adapter is None
        if self.data.is_described and not (trains_alone and engine == "ddp"):
            raise ValueError(
                "data.train holds descriptors, which train model.projection alone: set it, leave"
                " model.adapter out, and set engine to ddp"
            )
        if self.model.adapter is not None and self.optimizer.layer_decay is not None:
            raise ValueError(
                "optimizer.layer_decay is set, but adapters stand in no layer that timm knows:"
                " leave it out, or model.adapter"
            )
        for key in ("every", "also"):
            if getattr(self.evaluation, key) and self.data.validation is None:
                raise ValueError(f"evaluation.{key} is set, but data.validation names no data set")
        return self

    def _require_one_length(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("set either steps or epochs; neither is set")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"set either steps or epochs; steps is {self.steps} and epochs {self.epochs:g}"
            )

    def _refuse_reading(self) -> None:
        """Raise a ValueError if the way of reading does not fit the images or the sampling."""
        sampling = name_of("sampling", self.sampling)
        is_streamed = name_of("source", self.data.reading) == "streamed"
        if is_streamed and self.data.train_source.is_part:
            raise ValueError(
                f"data.reading is streamed, which gives all classes of {self.data.train}, not a"
                " part"
            )
        if is_streamed and sampling != "random":
            raise ValueError(
                "data.reading is streamed, which gives images in the order of the shards, but"
                f" sampling.name is {sampling}; set it to random, or data.reading to indexed"
            )
        if self.data.is_described and sampling == "mined":
            raise ValueError(
                "sampling.name is mined, which describes images again, but data.train holds"
                " descriptors"
            )

    def _refuse_for_deepspeed(self) -> None:
        """Raise a ValueError for settings that DeepSpeed cannot do."""
        keys = self.engine.keys if isinstance(self.engine, Part) else vars(self.engine)
        for key, value in (("step.fold_batchnorm", self.step.fold_batchnorm), ("ema", self.ema)):
            if value and keys.get("stage") == 3:
                raise ValueError(
                    f"{key} needs all parameters on every rank, but stage 3 of deepspeed shares"
                    f" them out; leave {key} out, or set engine.stage to 2 or engine to fsdp"
                )
        if self.optimizer.head_only:
            raise ValueError(
                "optimizer.head_only is set, but deepspeed moves all parameters in each step; set"
                " it to 0, or engine to ddp or fsdp"
            )
