"""Reading a recipe: YAML, overrides, and what is said of a wrong key or value."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ValidationError,
)

from distap.config.recipe import Recipe
from distap.config.sections import (
    SumOfLosses,
    Term,
)
from distap.errors import DistapError
from distap.ranking import (
    suggestion,
)
from distap.storage.redact import without_secrets


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
    # Of a whole section the words name the key; its values may be long, or secret.
    value = "" if isinstance(error["input"], dict) else f"{error['input']!r}: "
    return without_secrets(f"{where}: {value}{expected[:1].lower()}{expected[1:]}")


def _resolve(loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys of a pydantic location, without the tags of unions, and the keys known at its last section."""
    keys: list[str] = []
    section: Any = Recipe
    known = list(Recipe.model_fields)
    for part in map(str, loc):
        members = [member for member in get_args(section) or (section,) if _keys(member)]
        tagged = [member for member in members if part == _name(member)]
        if not members and get_origin(section) in (Union, UnionType):
            continue  # which of several plain types was tried
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
