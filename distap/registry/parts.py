"""Parts that a recipe chooses by name: objects built from names and keys, and back into them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, PydanticSchemaGenerationError, ValidationError
from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    PydanticSerializationError,
    core_schema,
)

from distap.errors import DistapError, problems_of, suggestion
from distap.registry.classes import (
    adapter_of,
    check_name,
    class_of,
    fields_in_source,
    fields_of,
    name_of,
    place_of,
    require_trusted,
    why_not_of,
)
from distap.registry.table import GIVEN, REGISTRY


def build_recorded(kind: str, settings: Any, trusted: bool) -> Any:
    """Build the part that a network's record describes.

    Raises:
        DistapError: a key or value is wrong, or the class needs trust.
    """
    with _explained(f"model.{kind}"):
        component = adapter_of(Annotated[Any, Chosen(kind)]).validate_python(
            settings, context=builds_recorded(trusted)
        )
        # The record of an object in Python cannot be built: build() raises the reason.
        return component.build() if isinstance(component, Part) else component


def builds_recorded(trusted: bool) -> "Builds":
    """Return the context in which `Chosen` builds the parts of a network's record.

    The record of an object in Python stays a `Part`. Without `trusted`, classes from elsewhere are
    rejected.
    """

    def builds(choice: Part) -> bool:
        if not trusted:
            require_trusted(choice.kind, choice.name)
        return choice.name != GIVEN

    return builds


def build_part(kind: str, name: str, **options: Any) -> Any:
    """Build an object of this kind; a DistapError names each wrong name, key or value."""
    with _explained(f"{kind} {name}"):
        return Part(kind, name, options).build()


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Raise a DistapError in place of the ValueErrors of names and pydantic's of values."""
    try:
        yield
    except ValidationError as error:
        raise DistapError(
            "recipe.value", f"{where}: {'; '.join(problems_of(error.errors()))}"
        ) from error
    except ValueError as error:
        raise DistapError("recipe.name", str(error)) from error


def sum_in_full(loss: Any) -> Any:
    """Return {sup_ap: 0.5, calibration: {weight: 0.5, beta: 0.5}} as the recipe of a WeightedSum.

    The losses of `by_set` may stand there without their key: {by_set: {faces: arc_face}}. Losses of
    other forms are returned unchanged.
    """
    if not isinstance(loss, Mapping) or "name" in loss or not loss.keys() & REGISTRY["loss"].keys():
        return loss
    terms = []
    for name, value in loss.items():
        options = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight = options.pop("weight", 1.0)
        if name == "by_set" and "losses" not in options:
            options = {"losses": options}
        terms.append((weight, {**options, "name": name}))
    if len(terms) == 1 and terms[0][0] == 1:
        return terms[0][1]
    return {"name": "sum", "terms": terms}


@dataclass(frozen=True)
class Part:
    """A part that a recipe chooses by name, with its keys, before its class is imported.

    It can also be the record of an object in Python, which is then called GIVEN.
    """

    kind: str
    name: str
    keys: Mapping[str, Any]

    def build(self, context: "Builds | None" = None) -> Any:
        """Import the class and build the object.

        Raises:
            ValidationError: a key or its value is wrong.
            ValueError: the name is wrong.
        """
        if self.name == GIVEN:
            raise ValueError(
                f"an object in Python, {self.keys.get('of')}, was here; distap.train(...) takes it"
                " again"
            )
        chosen = class_of(self.kind, self.name)
        names = fields_of(chosen)
        self.require_known(names)

        options = dict(self.keys)
        preset = options.pop("preset", None)
        if preset is not None:
            presets: Mapping[str, Mapping[str, Any]] = getattr(chosen, "presets", {})
            if str(preset) not in presets:
                raise ValueError(
                    f"{self.kind} {self.name} has no preset {preset!r};"
                    f" {suggestion(str(preset), presets)}"
                )
            options = {**presets[str(preset)], **options}
        if "name" in names:
            options["name"] = self.name
        return adapter_of(chosen).validate_python(options, context=context)

    def require_known(self, names: Collection[str]) -> None:
        """Raise a ValidationError for each key that is not among the fields `names` of the class.

        The key `preset` is no field.
        """
        keys = [name for name in names if name != "name"]
        unknown = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "unknown_key", "unknown key; {hint}", {"hint": suggestion(str(key), keys)}
                ),
                loc=(key,),
                input=value,
            )
            for key, value in self.keys.items()
            if key not in (*keys, "preset")
        ]
        if unknown:
            raise ValidationError.from_exception_data(f"{self.kind} {self.name}", unknown)


# Decides whether to build a part that is being validated; it may raise a ValueError instead.
Builds = Callable[[Part], bool]


@dataclass(frozen=True)
class Chosen:
    """Annotation of a field that a recipe chooses by name.

    `loss: Annotated[Any, Chosen("loss")] = "ap_q"` takes a name, or a mapping of `name` and keys,
    and holds the object that they describe. A `Builds` as the context of the validation decides
    which parts to build; the field holds the others as `Part`.
    """

    kind: str  # a key of REGISTRY
    otherwise: str | None = None  # the name that a mapping without `name` stands for

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._dump, info_arg=True
            ),
        )

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            if not why_not_of(self.kind, type(value)):
                return value
            raise ValueError("expected a name, or a mapping with `name` and keys")
        name = value.get("name", self.otherwise)
        if name is None:
            raise ValueError(
                f"the name of the {self.kind} is missing; {suggestion('', REGISTRY[self.kind])}"
            )
        if name != GIVEN:
            check_name(self.kind, name)
        choice = Part(self.kind, str(name), {key: value[key] for key in value if key != "name"})
        place = REGISTRY[self.kind].get(choice.name, "")
        if place.startswith("distap."):
            choice.require_known(fields_in_source(place))
        if info.context is None or info.context(choice):
            return choice.build(info.context)
        return choice

    def _dump(self, component: Any, info: core_schema.SerializationInfo) -> Any:
        if isinstance(component, Part):
            return {"name": component.name, **component.keys}
        if _can_be_named(self.kind, component):
            mode: Literal["json", "python"] = "json" if info.mode == "json" else "python"
            return {
                "name": name_of(self.kind, component),
                **adapter_of(component.__class__).dump_python(component, mode=mode),
            }
        settings: dict[str, Any] = {}
        with suppress(PydanticSchemaGenerationError, PydanticSerializationError):
            settings = adapter_of(component.__class__).dump_python(component, mode="json")
        return {"name": GIVEN, "of": place_of(getattr(component, "given", component)), **settings}


def _can_be_named(kind: str, component: object) -> bool:
    """Return whether another process could build a component by its name.

    It could not if it wraps an object of the caller, as its attribute `given`.
    """
    if hasattr(component, "given") or type(component).__module__ == "__main__":
        return False
    try:
        return class_of(kind, name_of(kind, component)) is type(component)
    except ValueError:
        return False


def by_path(
    entry: Mapping[str, Any], separator: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, such as a recipe, with the keys that lead to each."""
    for key, value in entry.items():
        if isinstance(value, Mapping) and value:
            yield from by_path(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def value_of(part: Any, key: str) -> Any:
    """Return the value of a key of a part that a recipe chooses by name, built or not."""
    return part.keys.get(key) if isinstance(part, Part) else getattr(part, key, None)
