"""Base classes of a recipe's sections, and texts that are checked by parsing them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from distap.errors import DistapError
from distap.storage.locations import parse_source, parse_store
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
        """What a name alone stands for."""
        return {"name": name}

    @classmethod
    def choice(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings = handler(self)
        return settings.pop("chosen") | settings


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    """Validate a text by parsing it, and keep its normal form."""

    def check(text: str) -> str:
        try:
            return str(parse(text))
        except DistapError as error:
            raise ValueError(str(error)) from error

    return AfterValidator(check)


Remote = Annotated[RemoteSettings, AfterValidator(without_secret_options)]
# The recipe checks allow_pipes when it knows all keys.
TrainShards = Annotated[str, _checked(partial(parse_source, allow_pipes=True))]
Shards = Annotated[str, _checked(parse_source)]
StoreURL = Annotated[str, _checked(parse_store)]
