"""Base class of a recipe's sections, and values that several sections hold."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.storage.locations import Source, parse_source, parse_store

Unit = Literal["steps", "epochs"]  # an epoch is as many images as there are to train on


class Section(BaseModel):
    """A section of a recipe: refuse unknown keys and later changes. Validate defaults too, which may be names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _parsed(parse: Callable[[str], object]) -> Callable[[object], str | Source]:
    """Normalise a text by parsing it; keep a data set in Python as it is."""

    def check(value: object) -> str | Source:
        if isinstance(value, Source):
            return str(value) if value.rows is None else value
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be a valid string")
        try:
            return str(parse(value))
        except DistapError as error:
            raise ValueError(str(error)) from error

    return check


Shards = Annotated[str | Source, PlainValidator(_parsed(parse_source)), PlainSerializer(str)]
SizingText = Annotated[str, AfterValidator(_parsed(Sizing.parse))]
StoreURL = Annotated[str, AfterValidator(_parsed(parse_store))]
