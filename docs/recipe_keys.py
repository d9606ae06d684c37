"""Keys of a recipe: possible values, defaults and meanings."""

import ast
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from distap.config.recipe import Recipe
from distap.registry import REGISTRY, Chosen, class_of, name_of, place_of

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
PLAIN = {
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "str": "text",
    "Path": "path",
} | {**{"tuple": "list", "dict": "keys", "Mapping": "keys", "Any": "text", "Source": "text"}}


@dataclass(frozen=True)
class Key:
    path: str  # such as optimizer.learning_rate
    of: str  # the name next to which it may stand, such as ap_q; "" for keys that always may
    values: str
    default: str  # as in a recipe; "" if the key has to be given
    meaning: str


def recipe_keys(section: type = Recipe, prefix: str = "", of: str = "") -> Iterator[Key]:
    """Yield all keys of a section, each followed by the keys of its sub-sections and of parts
    chosen by name.
    """
    for name, annotation, default, meaning in _fields(section):
        # keys that a user chooses
        by_name = get_args(annotation)[1] if get_origin(annotation) is dict else None
        kind = _chosen(annotation)
        inner = _section(annotation if by_name is None else by_name)
        below = prefix if name == "chosen" else f"{prefix}{name}."
        below += "" if by_name is None or not (kind or inner) else "NAME."
        if name != "chosen":
            told = "name, or keys with a name" if kind else "keys" if inner else _values(annotation)
            meaning = meaning or (_first_line(inner) if inner else "")
            yield Key(prefix + name, of, told, "" if inner and not kind else default, meaning)
        if inner:
            yield from recipe_keys(inner, below, of)
        if kind and not of:  # a sum of losses has losses within
            names = ", ".join(REGISTRY[kind.kind])
            yield Key(
                f"{below}name",
                of,
                names,
                kind.otherwise or "",
                "Name of one of these, or package.module:Class.",
            )
            for of_class, chosen in _classes(kind.kind):
                for key in recipe_keys(chosen, below, ", ".join(of_class)):
                    if key.path != f"{below}name":
                        yield key


def _classes(kind: str) -> Iterator[tuple[list[str], type]]:
    """Yield each class of a kind with all its names."""
    for place in dict.fromkeys(REGISTRY[kind].values()):
        names = [name for name, known in REGISTRY[kind].items() if known == place]
        yield names, class_of(kind, names[0])


def _fields(section: type) -> Iterator[tuple[str, Any, str, str]]:
    """Yield name, annotation, default and docstring of the fields of a pydantic model or of a
    dataclass.
    """
    hints = get_type_hints(section, include_extras=True)
    told = dict[str, str]()
    for each in reversed(section.__mro__):
        if each.__module__ in sys.modules and not each.__module__.startswith(
            ("builtins", "pydantic")
        ):
            told |= _docstrings(each.__module__).get(each.__name__, {})
    if issubclass(section, BaseModel):
        of_model = section.model_fields.items()
        defaults = {name: field.get_default(call_default_factory=True) for name, field in of_model}
    else:
        of_class = fields(section) if is_dataclass(section) else ()
        defaults = {
            field.name: field.default
            if field.default_factory is MISSING
            else field.default_factory()
            for field in of_class
        }
    for name, default in defaults.items():
        yield name, hints[name], _default(default), told.get(name, "")


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings under the fields of a module's classes, by class and field, from its
    source.
    """
    found: dict[str, dict[str, str]] = {}
    classes = [
        each
        for each in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(each, ast.ClassDef)
    ]
    for each in classes:
        for field, below in pairwise(each.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(told))):
                    found.setdefault(each.name, {})[name] = " ".join(told.split())
    return found


def _first_line(section: type) -> str:
    return (inspect.getdoc(section) or "").partition("\n")[0]


def _chosen(annotation: Any) -> Chosen | None:
    metadata = getattr(annotation, "__metadata__", ())
    return next(
        (
            each
            for each in (*metadata, *map(_chosen, get_args(annotation)))
            if isinstance(each, Chosen)
        ),
        None,
    )


def _section(annotation: Any) -> type | None:
    """Return the sub-section that a key holds (or null); None if the key may also be written as
    text.
    """
    parts = _parts(annotation)
    found = [part for part in parts if isinstance(part, type) and _is_section(part)]
    return found[0] if found and str not in parts else None


def _is_section(part: type) -> bool:
    return issubclass(part, BaseModel) or (
        is_dataclass(part) and part.__module__.startswith("distap.")
    )


def _parts(annotation: Any) -> list[Any]:
    """Return the members of a union, without the metadata of Annotated."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return (
        [part for each in get_args(annotation) for part in _parts(each)]
        if is_union
        else [annotation]
    )


def _values(annotation: Any) -> str:
    """Describe a key's values for people, such as `integer > 0 or auto`."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = [
            f"{sign} {getattr(part, bound):g}"
            for each in metadata
            for part in getattr(each, "metadata", None) or [each]
            for bound, sign in BOUNDS.items()
            if isinstance(getattr(part, bound, None), int | float)
        ]
        return " ".join([_values(inner), ", ".join(bounds)]).rstrip()
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_values(each) for each in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return " or ".join(map(_default, get_args(annotation)))
    if annotation in (None, type(None)):
        return "null"
    name = (
        (get_origin(annotation) or annotation).__name__
        if hasattr(annotation, "__name__")
        else str(annotation)
    )
    return PLAIN.get(name, name)


def _default(value: Any) -> str:
    if value in (MISSING, PydanticUndefined):
        return ""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_default, value))}]"
    for kind, known in REGISTRY.items():
        if place_of(value) in known.values():
            return name_of(kind, value)
    return f"{value:g}" if isinstance(value, float) else str(value)
