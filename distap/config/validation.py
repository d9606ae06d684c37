"""Base classes of a recipe's sections, and texts that are checked by parsing them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from distap.errors import DistapError
from distap.storage.locations import Source, parse_source, parse_store
from distap.storage.remotes import RemoteSettings, without_secret_options


class Section(BaseModel):
    """Closed to unknown keys, and frozen. Defaults are validated, since a default may be a name to look up."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ChoosingSection(Section):
    """A section whose further keys belong to `chosen`, the part or parts that it chooses."""

    chosen: Any

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, settings: Any) -> Any:
        if isinstance(settings, str):
            settings = cls.named(settings)
        if not isinstance(settings, Mapping):
            raise ValueError("expected a name, or a mapping of keys to values")
        own = {key: value for key, value in settings.items() if key in cls.model_fields}
        return {"chosen": cls.choice({key: settings[key] for key in settings if key not in own}), **own}

    @classmethod
    def named(cls, name: str) -> dict[str, Any]:
        """Return what a name alone stands for."""
        return {"name": name}

    @classmethod
    def choice(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings = handler(self)
        return settings.pop("chosen") | settings


def _checked_store(url: str) -> str:
    try:
        return parse_store(url)
    except DistapError as error:
        raise ValueError(str(error)) from error


def _shards(allow_pipes: bool = False) -> PlainValidator:
    """Validate the name of a data set by parsing it, and keep its normal form, or a data set in Python as it is."""

    def check(value: object) -> str | Source:
        if isinstance(value, Source):
            return str(value) if value.rows is None else value
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be a valid string")
        try:
            return str(parse_source(value, allow_pipes=allow_pipes))
        except DistapError as error:
            raise ValueError(str(error)) from error

    return PlainValidator(check)


Remote = Annotated[RemoteSettings, AfterValidator(without_secret_options)]
# The recipe checks allow_pipes when it knows all keys.
TrainShards = Annotated[str | Source, _shards(allow_pipes=True), PlainSerializer(str)]
Shards = Annotated[str | Source, _shards(), PlainSerializer(str)]
StoreURL = Annotated[str, AfterValidator(_checked_store)]
