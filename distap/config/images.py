"""The sections of a recipe that say which images are trained and evaluated on, and how they are taken."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from distap.config.rates import Unit
from distap.config.validation import Remote, Section, Shards, TrainShards
from distap.data.pixel_and_cache_settings import CacheSettings, PixelSettings
from distap.registry import Chosen
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings


class ImagesSection(Section):
    """The images as evaluation sees them: what a trained network needs of the data section."""

    validation: Shards | None = Field(None, description="Shards to evaluate on; null evaluates nothing.")
    validation_index: Path | None = Field(None, description="Index of the validation shards, if not beside them.")
    gallery: Shards | None = Field(
        None, description="Shards that the images of data.validation retrieve; null for each other's."
    )
    gallery_draws: int = Field(
        0, ge=0, description="Draw an image a class of data.validation as the others' gallery, so many times."
    )
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
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] = Field(
        "crop_flip_colour", description="How training images are varied."
    )
    prefetch: PositiveInt = Field(4, description="Micro-batches that each worker reads ahead.")
    pixels: PixelSettings = Field(PixelSettings(), description="Where pixels wait between describe and replay.")
    max_damaged: float = Field(
        0.05, ge=0, le=1, description="Stop when more than this share of images is damaged (10 are always tolerated)."
    )

    @model_validator(mode="after")
    def _one_gallery(self) -> "DataSection":
        if (self.gallery or self.gallery_draws) and not self.validation:
            raise ValueError("gallery and gallery_draws are for the images of validation, which names none")
        return self

    @property
    def train_source(self) -> Source:
        return parse_source(self.train, self.train_index, self.allow_pipes)


class SizedSection(Section):
    """How evaluation brings images to size; without any of these keys it crops the largest square."""

    resize: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        None,
        description="Scale the shorter side to this many pixels, or all to [height, width], before cropping; null "
        "crops the largest square.",
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
        resize = "x".join(map(str, self.resize)) if isinstance(self.resize, tuple) else self.resize
        return f"{'' if resize is None else f'resize {resize} '}crop {self.crop or image_size}"


class DescribingSection(SizedSection):
    """The part of the evaluation section that describing images needs."""

    scales: tuple[PositiveFloat, ...] = Field(
        (1.0,), min_length=1, description="Describe each image at these scales."
    )
    antialias: bool = Field(True, description="Smooth images before shrinking them to a scale below 1.")
    recall_at: tuple[PositiveInt, ...] = Field(
        (1, 5, 10), min_length=1, description="The k of R@k and mP@k, except where a ground truth says them."
    )
    gap_batch: int | None = Field(
        None, ge=2, description="Also give by how much mAP is higher within random batches of this many images."
    )
    batch_size: PositiveInt = Field(64, description="Images described at once.")


class EvaluatedSet(SizedSection):
    """A data set to evaluate on beside data.validation; images are taken as there unless a key says otherwise."""

    data: str = Field(description="Shards, or a folder with a ground truth that `distap data convert` wrote.")
    gallery: str | None = Field(None, description="Shards that the images retrieve; null for each other's.")
    gallery_draws: int = Field(0, ge=0, description="Draw an image a class as the others' gallery, so many times.")
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

    every: int | None = Field(None, ge=0, description="How often; null evaluates first and last, 0 never.")
    unit: Unit = Field("steps", description="Of `every`.")
    at_start: bool = Field(True, description="Evaluate before the first step too, to show what training gains.")
    also: dict[str, EvaluatedSet] = Field(
        {}, description="Other data sets, by the name under which their figures appear."
    )
