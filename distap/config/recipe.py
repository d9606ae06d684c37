"""The recipe of a training: the sections about images, and all sections together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from distap.config import sections
from distap.config.evaluation_sections import (
    MEAN,
    MERGED,
    BestSection,
    DescribingSection,
    EvaluationSection,
)
from distap.config.sections import PrecisionName, Section, Shards
from distap.config.training_sets import (
    RowFolders,
    SetName,
    TrainingSet,
    TrainingSets,
    kind_of_sets,
    refuse_unfit_sampling,
    require_alike,
)
from distap.data.sizing import PixelSettings
from distap.errors import DistapError
from distap.registry import Chosen, name_of, sum_in_full, value_of
from distap.storage.cache import CacheSettings
from distap.storage.locations import Source, parse_source, sets_in_words
from distap.storage.remotes import CONNECTIONS

DeviceName = Literal["auto", "cuda", "cpu"]


class ImagesSection(Section):
    """Images to evaluate on: the part of the data section that a trained network needs."""

    validation: (
        Annotated[
            Annotated[Shards, Tag("[set]")]
            | Annotated[dict[SetName, Shards], Field(min_length=1), Tag("[sets]")],
            Discriminator(kind_of_sets),
        ]
        | None
    ) = None
    """Shards to evaluate on, or several by name, such as {cars: A, birds: B}; null evaluates
    nothing."""
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
    requests: PositiveInt = CONNECTIONS
    """Number of requests that each worker has under way to a store. Lower it if a web server
    refuses so many."""

    @property
    def validation_sets(self) -> dict[str, str | Source]:
        """Sets of `validation` by name, sorted; one without a name has that of its place."""
        if self.validation is None:
            return {}
        if isinstance(self.validation, dict):
            return dict(sorted(self.validation.items()))
        return {str(self.validation): self.validation}


class DataSection(ImagesSection):
    """Training images: where they are, and how to read them."""

    train: Annotated[
        Annotated[Shards, Tag("[set]")] | Annotated[TrainingSets, Tag("[sets]")],
        Discriminator(kind_of_sets),
    ]
    """Shards to train on: a folder, a pattern or a URL. To train model.projection alone on stored
    descriptors, give described:FOLDER, where FOLDER was written by `distap extract`. Several data
    sets are a mapping of names to sets: {cars: shards/cars, birds: {data: shards/birds, weight:
    2}}."""
    reading: Annotated[Any, Chosen("source")] = "indexed"
    """Read single images by the index of the shards (`indexed`), or whole shards one after another
    (`streamed`), which needs no index, but gives the same batches again only for the same numbers
    of ranks and workers."""
    image_sizes: dict[Annotated[float, Field(ge=0, lt=1)], PositiveInt] = Field({})
    """Train on smaller images first: width and height by the share of the steps from which they
    hold, such as {0: 64, 0.7: 96} next to an image_size of 96; none trains at image_size
    throughout."""
    rows: RowFolders = Field({})
    """Rows of each training image that the loss takes, such as the descriptors of a teacher, by the
    parameter of the loss: {teacher: FOLDER}, where FOLDER, on disk or behind a URL, was written by
    `distap extract`. They are joined to the images by name. An augmented image keeps the row of the
    whole image. With several data sets, each set of data.train has `rows` of its own."""
    unseen_classes: bool = True
    """Refuse a validation set that shares a class with training."""
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] = (
        "crop_flip_colour"
    )
    """Augmentation: crop and vary training images at random."""
    prefetch: PositiveInt = 4
    """Number of micro-batches that each worker reads ahead."""
    cache: CacheSettings | None = None
    """Folder on each host's own disk for whole shards, fetched ahead in the order of the batches.
    Use it with sampling.window, or if the data set fits; null reads each image from its store."""
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
        if (self.gallery or self.gallery_draws) and isinstance(self.validation, dict):
            raise ValueError(
                "gallery and gallery_draws are for one validation set, but validation names"
                f" {', '.join(self.validation)}: name a set with a gallery in evaluation.also"
            )
        sizes = [size for _, size in self.sizes]
        if sizes != sorted(sizes) or sizes[-1] != self.image_size:
            raise ValueError(
                f"image_sizes: expected sizes that rise to image_size, {self.image_size}, not"
                f" {sizes}"
            )
        return self

    @model_validator(mode="after")
    def _sets_fit(self) -> "DataSection":
        if isinstance(self.train, Mapping):
            require_alike(self.train, self.rows)
        return self

    @property
    def train_sets(self) -> dict[str, TrainingSet]:
        """The sets to train on, sorted by name; the name of a single one is empty."""
        if isinstance(self.train, Mapping):
            return dict(sorted(self.train.items()))
        return {"": TrainingSet(data=self.train, rows=self.rows)}

    @property
    def train_sources(self) -> dict[str, Source]:
        """Return where the sets to train on are, by name."""
        return {name: parse_source(settings.data) for name, settings in self.train_sets.items()}

    @property
    def train_source(self) -> Source:
        """Return where the only set to train on is; raise a DistapError if there are several."""
        if isinstance(self.train, Mapping):
            raise DistapError(
                "recipe.several_sets",
                f"data.train names {len(self.train)} data sets, but this takes a recipe of one:"
                " give one of them, such as data.train="
                + str(next(iter(self.train_sets.values())).data),
            )
        return parse_source(self.train)

    @property
    def train_name(self) -> str:
        """Return what is trained on, in words."""
        if isinstance(self.train, Mapping):
            return sets_in_words({name: vars(settings) for name, settings in self.train.items()})
        return str(self.train)

    @property
    def row_names(self) -> list[str]:
        """Names of the rows that the training takes of each image, sorted."""
        return sorted({name for settings in self.train_sets.values() for name in settings.rows})

    @property
    def sizes(self) -> list[tuple[float, int]]:
        """Sizes of training images, each with the share of the steps from which it holds."""
        return sorted(({0.0: self.image_size} | self.image_sizes).items())

    @property
    def is_described(self) -> bool:
        """Return whether descriptors stand for the training images."""
        return all(source.kind == "described" for source in self.train_sources.values())


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
    """Precision of the network's computations; parameters stay float32. fp16 keeps a loss scale,
    and is for GPUs without bf16."""
    timeout_seconds: PositiveFloat = 600
    """Time limit of each communication between ranks, seconds."""
    data: DataSection
    sampling: Annotated[Any, Chosen("sampling", otherwise="random")] = "random"
    """Sampling that draws the images of each global batch."""
    loss: Annotated[Any, Chosen("loss", otherwise="ap_q"), BeforeValidator(sum_in_full)] = "ap_q"
    """Ranking loss; a sum is written as {sup_ap: 0.5, calibration: 0.5}."""
    memory: sections.MemorySection = sections.MemorySection()
    rank: sections.RankSection = sections.RankSection()
    describe: sections.DescribeSection = sections.DescribeSection()
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

    @property
    def headline(self) -> str:
        """Name of the figures that stand for data.validation: `mean`, if it names several sets."""
        if not isinstance(self.data.validation, dict):
            return str(self.data.validation)
        return MEAN if len(self.data.validation) > 1 else next(iter(self.data.validation))

    @property
    def best(self) -> BestSection:
        """Figure that chooses the best checkpoint, with the name of its set."""
        best = self.evaluation.best or BestSection()
        return best if best.set else best.model_copy(update={"set": self.headline})

    @property
    def scored_by(self) -> str:
        """Name of that figure, such as `mean mAP of cars, birds`: equal scores mean the same."""
        best = self.best
        text = {str(self.data.validation): "validation"}
        sets = [text.get(name, name) for name in self.data.validation_sets]
        of_sets = ""
        if best.set in (MEAN, MERGED):
            of_sets = " of " + ", ".join([*sets, *self.evaluation.also])
        return f"{text.get(str(best.set), best.set)} {best.figure}{of_sets}"

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
        refuse_unfit_sampling(self.sampling, self.data.train, self.data.train_sets)
        self._refuse_for_towers()
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
        self._refuse_names()
        for key in ("every", "also", "merged", "best"):
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

    def _refuse_names(self) -> None:
        """Raise a ValueError if figures of two evaluation sets would have one name."""
        names = [*self.data.validation_sets, *self.evaluation.also]
        for name in names:
            if names.count(name) > 1 or name in (MEAN, MERGED, "validation"):
                raise ValueError(
                    f"data.validation and evaluation.also: figures of {name} are there already:"
                    " give the set another name"
                )

    def _refuse_reading(self) -> None:
        """Raise a ValueError if the way of reading does not fit the images or the sampling."""
        sampling = name_of("sampling", self.sampling)
        is_streamed = name_of("source", self.data.reading) == "streamed"
        data = self.data
        if is_streamed and any(source.is_part for source in data.train_sources.values()):
            raise ValueError(
                f"data.reading is streamed, which gives all classes of {data.train_name}, not a"
                " part"
            )
        if is_streamed and data.rows:
            raise ValueError(
                "data.reading is streamed, which gives images without their numbers, so that"
                " data.rows cannot be joined to them: index the shards, and set it to indexed"
            )
        if is_streamed and isinstance(data.train, Mapping):
            raise ValueError(
                "data.reading is streamed, which knows no classes to share out among the sets of"
                " data.train: index their shards, and set it to indexed"
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

    def _refuse_for_towers(self) -> None:
        """Raise a ValueError for bfloat16 parameters without autocast, or kept graphs of passes."""
        for key, value in (
            ("engine.gather", value_of(self.engine, "gather")),
            ("model.adapter.base", value_of(self.model.adapter, "base")),
        ):
            if value == "bf16" and {self.precision, self.evaluation.precision} != {"bf16"}:
                raise ValueError(f"{key} is bf16: set precision and evaluation.precision to bf16")
        if value_of(self.engine, "reshard") == "pass" and self.keep not in ("auto", 0):
            raise ValueError(f"replay.keep is {self.keep}: set it to 0 for engine.reshard: pass")

    def _refuse_for_deepspeed(self) -> None:
        """Raise a ValueError for settings that DeepSpeed cannot do."""
        # It has another loss scale, and hooks in the network.
        names = {"precision": self.precision, "model.compile": self.model.compile}
        for key, name in names.items():
            if name in ("fp16", "blocks"):
                raise ValueError(f"{key} is {name}, for which engine has to be ddp or fsdp")
        for key, value in (("step.fold_batchnorm", self.step.fold_batchnorm), ("ema", self.ema)):
            if value and value_of(self.engine, "stage") == 3:
                raise ValueError(
                    f"{key} needs all parameters on every rank, but stage 3 of deepspeed shares"
                    f" them out; leave {key} out, or set engine.stage to 2 or engine to fsdp"
                )
        if self.optimizer.head_only:
            raise ValueError(
                "optimizer.head_only is set, but deepspeed moves all parameters in each step; set"
                " it to 0, or engine to ddp or fsdp"
            )
