"""The section of one of several data sets to train on."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from distap.config.sections import Section, Shards
from distap.registry import Chosen, value_of
from distap.storage.locations import parse_source


def _name_of_set(name: str) -> str:
    # It may become the name of a folder.
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError("the name of a data set has letters, digits, `_`, `.` and `-` alone")
    return name


SetName = Annotated[str, AfterValidator(_name_of_set)]
RowFolders = dict[str, Shards]  # by the parameter of the loss


def kind_of_sets(value: Any) -> str:
    """Return the tag of one data set or of several; by the brackets, messages know it from keys."""
    return "[sets]" if isinstance(value, Mapping) else "[set]"


class TrainingSet(Section):
    """One of several data sets to train on. A text alone is its `data`."""

    data: Shards
    """Shards to train on: a folder, a pattern or a URL, or what else data.train takes."""
    weight: Annotated[float, Field(gt=0)] | Literal["size", "sqrt"] = 1.0
    """Weight of the set in batches, next to those of the others: a number; or in all sets the
    number of images (size) or its square root (sqrt)."""
    repeat: bool = True
    """Go through the set again when its images are used up; false refuses a training that takes
    more images of it than it holds."""
    augmentation: Annotated[Any, Chosen("augmentation", otherwise="crop_flip_colour")] | None = None
    """Augmentation of the set; null takes data.augmentation."""
    rows: RowFolders = Field({})
    """Rows of the set's images that the loss takes, as data.rows has them for a single set. All
    sets name the same."""

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping) else {"data": value}


TrainingSets = Annotated[dict[SetName, TrainingSet], Field(min_length=1)]


def require_alike(sets: Mapping[str, TrainingSet], rows: Mapping[str, Any]) -> None:
    """Raise a ValueError unless several data sets have weights, images and rows of one kind.

    Args:
        rows: those of data.rows, which is for a single set.
    """
    first = next(iter(sets))
    if rows:
        raise ValueError(
            "rows are those of a single data set, but train names sets: give each of them rows of"
            f" its own, such as data.train.{first}.rows"
        )
    weights = [settings.weight for settings in sets.values()]
    words = {weight for weight in weights if isinstance(weight, str)}
    if len(words) > 1 or (words and words != {*weights}):
        raise ValueError("train: weights are numbers, or `size` in all sets, or `sqrt` in all sets")
    if len({parse_source(settings.data).kind == "described" for settings in sets.values()}) > 1:
        raise ValueError("train: descriptors (described:) and images do not mix")
    names_of = {name: ", ".join(sorted(settings.rows)) or "none" for name, settings in sets.items()}
    for name, names in names_of.items():
        if names != names_of[first]:
            raise ValueError(
                f"train.{name}.rows are {names}, but train.{first}.rows are {names_of[first]}: the"
                " loss takes the same rows of every image"
            )


def refuse_unfit_sampling(sampling: Any, train: Any, sets: Mapping[str, TrainingSet]) -> None:
    """Raise a ValueError for keys of sampling that do not fit the sets of data.train."""
    is_named = isinstance(train, Mapping)
    fits = {"mix": is_named, "follow_loss": is_named and len(sets) > 1}
    for key, is_right in fits.items():
        if value_of(sampling, key) is not None and not is_right:
            raise ValueError(
                f"sampling.{key} is for several data sets, but data.train is one: leave it out, or"
                " name the sets, as in data.train: {cars: shards/cars, birds: shards/birds}"
            )
    once = [name for name, settings in sets.items() if not settings.repeat]
    if value_of(sampling, "follow_loss") is not None and once:
        raise ValueError(
            f"data.train.{once[0]}.repeat is false, but with sampling.follow_loss nobody knows how"
            " often its images will come: leave one of them out"
        )
