"""The section of one of several data sets to train on."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from distap.config.sections import Section, Shards
from distap.registry import Chosen


def _name_of_set(name: str) -> str:
    # It may become the name of a folder.
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError("the name of a data set has letters, digits, `_`, `.` and `-` alone")
    return name


SetName = Annotated[str, AfterValidator(_name_of_set)]


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

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping) else {"data": value}


TrainingSets = Annotated[dict[SetName, TrainingSet], Field(min_length=1)]
