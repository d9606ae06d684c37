"""Sections of a recipe about images: which to train and evaluate on, and how to read and scale them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from distap.config.sections import Section, Shards, SizingText, Unit
from distap.data.sizing import PixelSettings
from distap.registry import Chosen
from distap.storage.locations import Source, parse_source

Scales = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


class ImagesSection(Section):
    """Images to evaluate on: the part of the data section that a trained network needs."""

    validation: Shards | None = None
    """Shards to evaluate on; null evaluates nothing."""
    gallery: Shards | None = None
    """Shards to search in for the images of data.validation; null lets these images retrieve each other."""
    gallery_draws: NonNegativeInt = 0
    """Draw a gallery of one image per class of data.validation this many times, and query the others."""
    image_size: PositiveInt = 224
    """Width and height of the network's input, pixels."""
    workers: NonNegativeInt = 2
    """Number of reader processes of each rank; 0 reads in the rank itself."""


class DataSection(ImagesSection):
    """Training images: where they are, and how to read them."""

    train: Shards
    """Shards to train on: a folder, a pattern or a URL; or descriptors on which model.projection trains alone,
    described:FOLDER that `distap extract` wrote."""
    train_index: Path | None = None
    """Index file of the training shards; null takes the one next to the shards."""
    reading: Annotated[Any, Chosen("source")] = "indexed"
    """Read image by image (`indexed`), or shard by shard with weaker promises (`streamed`)."""
    image_sizes: dict[Annotated[float, Field(ge=0, lt=1)], PositiveInt] = Field({})
    """Train on smaller images first: width and height by the share of the steps from which they hold, such as
    {0: 64, 0.7: 96} next to an image_size of 96; none trains at image_size throughout."""
    unseen_classes: bool = True
    """Refuse a validation set that shares a class with training."""
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] = "crop_flip_colour"
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
            raise ValueError("gallery and gallery_draws are for the images of validation, which names none")
        sizes = [size for _, size in self.sizes]
        if sizes != sorted(sizes) or sizes[-1] != self.image_size:
            raise ValueError(f"image_sizes: expected sizes that rise to image_size, {self.image_size}, not {sizes}")
        return self

    @property
    def train_source(self) -> Source:
        return parse_source(self.train, self.train_index)

    @property
    def sizes(self) -> list[tuple[float, int]]:
        """Return sizes of training images, each with the share of the steps from which it holds, from 0 on."""
        return sorted(({0.0: self.image_size} | self.image_sizes).items())

    @property
    def is_described(self) -> bool:
        """Tell whether descriptors stand for the training images."""
        return self.train_source.kind == "described"


class DescribingSection(Section):
    """Keys of the evaluation section for describing images."""

    sizing: SizingText | None = None
    """Scale whole images (`side N`: the longer side to N pixels at most; `original`), or crop the largest square
    (`crop N`) or the centre of a scaled image (`resize M crop N`, `resize HxW crop N`); null is `crop` of
    data.image_size."""
    scales: Scales = (1.0,)
    """Describe each image at these scales."""
    antialias: bool = True
    """Smooth images before shrinking them to a scale below 1."""
    dimensions: PositiveInt | None = None
    """Keep this many first dimensions of a descriptor, scaled to length 1 again, for networks that the loss
    `matryoshka` trained; null keeps all."""
    recall_at: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 5, 10)
    """Values k of R@k and mP@k, except where a ground truth sets them."""
    figures: tuple[str, ...] = ()
    """Names of the figures of data.validation; none takes mAP, mAP@R, and R@k and mP@k of recall_at."""
    batch_size: PositiveInt = 64
    """Number of images that evaluation describes at once. Lower it if memory runs out."""


class EvaluatedSet(Section):
    """A data set to evaluate on next to data.validation, with its images scaled alike unless a key here differs."""

    data: str
    """Shards, or a folder with a ground truth that `distap data convert` wrote."""
    gallery: str | None = None
    """Shards to search in for the images of `data`; null lets these images retrieve each other."""
    gallery_draws: NonNegativeInt = 0
    """Draw a gallery of one image per class this many times, query the others, and average the figures."""
    truth: Path | None = None
    """File that says for each image of `data` which ones are right, as `distap eval --truth` reads it."""
    figures: tuple[str, ...] = ()
    """Names of the figures to compute, such as [mAP, R@1, H-AP]; none takes those of the set's protocol."""
    distractors: tuple[str, ...] = ()
    """Shards to add to the gallery of a data set with a ground truth."""
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
