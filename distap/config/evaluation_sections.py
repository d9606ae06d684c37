"""The section of a recipe about evaluation: sets, their figures, and which choose the best."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from distap.config.sections import PrecisionName, Section, SizingText, Unit

Scales = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
# Names under which the figures of several sets together appear.
MEAN = "mean"
MERGED = "merged"


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
    gallery_rows: Path | list[Path] | None = None
    """Folder, or list of folders, that `distap extract` wrote of the same images by another
    network, for figures of queries in the other's gallery: `new-to-old mAP`, new being the network
    in training, `old-to-new mAP`, and `old-to-old mAP`, which stays the same."""
    figures: tuple[str, ...] = ()
    """Names of the figures to compute, such as [mAP, R@1, H-AP]; none takes those of the set's
    protocol."""
    sizing: SizingText | None = None
    """Scale images in this way; null takes evaluation.sizing."""
    scales: Scales | None = None
    """Describe each image at these scales; null takes evaluation.scales."""


class BestSection(Section):
    """Figure by which the best checkpoint is chosen: the higher, the better."""

    set: str | None = None
    """Name of a set, or mean or merged; null takes data.validation, or mean if it names several."""
    figure: str = "mAP"
    """Name of a figure of that set, such as R@1, or new-to-old mAP with gallery_rows."""


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
    merged: bool = False
    """Evaluate all sets with classes as one too, in which data set and class must agree, as UnED
    does; its figures are those of `merged`."""
    best: BestSection | None = None
    """Figure that chooses the best checkpoint; null takes mAP, see its keys."""
    patience: PositiveInt | None = None
    """Stop, with status 0, when this many evaluations in a row have not raised the figure that
    chooses the best checkpoint, which stays; null trains to the last step. It needs
    evaluation.every. It may change when a run goes on."""

    @model_validator(mode="after")
    def _patience_counts_evaluations(self) -> "EvaluationSection":
        if self.patience and not self.every:
            raise ValueError(
                "evaluation.patience counts evaluations during training: set evaluation.every"
            )
        return self
