"""Classes by their names in a recipe: importing them, their names, and their fields."""

import ast
import importlib
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from distap.errors import suggestion
from distap.registry.table import GIVEN, LOSS_BASE, METHODS, REGISTRY

WAY_TO_TRUST = "--trust on the command line or trust=True in Python"
# Kinds and names of classes from elsewhere that a recipe or a caller chose in this process.
_CHOSEN: set[tuple[str, str]] = set()


def class_of(kind: str, name: str) -> type:
    """Import the class that a name of this kind, or "package.module:Class", stands for.

    Raises:
        ValueError: the name is unknown, its module or class does not exist, or the class is not of
            this kind.
    """
    check_name(kind, name)
    if name not in REGISTRY[kind]:
        _CHOSEN.add((kind, name))
    module_name, _, attribute = REGISTRY[kind].get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{kind} {name!r}: {error}; is its folder on PYTHONPATH, or its package installed?"
        ) from error

    chosen = getattr(module, attribute, None)
    if chosen is None:
        raise ValueError(f"{name!r}: the module {module_name} has no {attribute}")
    if not (isinstance(chosen, type) and (is_dataclass(chosen) or issubclass(chosen, BaseModel))):
        or_function = ", or a function under @distap.loss" if kind == "loss" else ""
        raise ValueError(
            f"{name!r}: expected a dataclass or a pydantic model, whose fields are the"
            f" keys{or_function}"
        )
    reason = why_not_of(kind, chosen)
    if reason:
        raise ValueError(f"{name!r}: a {kind} {reason}")
    return chosen


def why_not_of(kind: str, chosen: type) -> str:
    """Return why objects of a class are not of this kind, or "" if they are."""
    for method in METHODS[kind]:
        if not callable(getattr(chosen, method, None)):
            return f"needs a method {method!r}, which {chosen.__name__} has not"
    if kind == "loss" and LOSS_BASE not in map(place_of, chosen.__mro__):
        base = LOSS_BASE.replace(":", ".")
        return f"has to be a subclass of {base}, which {chosen.__name__} is not"
    return ""


def check_name(kind: str, name: object) -> None:
    """Raise a ValueError unless a name is in the table or has the form "package.module:Class".

    Import nothing.
    """
    text = str(name)  # YAML may hold a number or a list here
    if text in REGISTRY[kind]:
        return
    module, _, attribute = text.partition(":")
    if not all(word.isidentifier() for word in (*module.split("."), attribute)):
        or_path = ", or package.module:Class" if "." in text else ""
        raise ValueError(f"{kind} {name!r} is unknown; {suggestion(text, REGISTRY[kind])}{or_path}")


def require_trusted(kind: str, name: str) -> None:
    """Raise a ValueError if a record names a class that is neither distap's nor chosen here too.

    Importing a class runs code, and records of networks come from strangers.
    """
    if name not in (*REGISTRY[kind], GIVEN) and (kind, name) not in _CHOSEN:
        raise ValueError(
            f"{kind} {name!r} is a class that the record of a network names, and importing it would"
            f" run its code; if you trust who wrote it, say so by {WAY_TO_TRUST}"
        )


def name_of(kind: str, component: object) -> str:
    """Return the name by which a recipe chooses an object of this kind."""
    # A class that serves several names keeps the one that it received.
    received = getattr(component, "name", None)
    if isinstance(received, str):
        return received
    place = place_of(component)
    return next((name for name, path in REGISTRY[kind].items() if path == place), place)


def place_of(component: object) -> str:
    """Return "package.module:Class" of an object, or "package.module:function" of a function."""
    definition = component if hasattr(component, "__qualname__") else type(component)
    return f"{definition.__module__}:{definition.__qualname__}"


def fields_of(chosen: type) -> list[str]:
    if is_dataclass(chosen):
        return [field.name for field in fields(chosen)]
    return list(getattr(chosen, "model_fields", ()))


@cache
def adapter_of(chosen: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a class, which validates and writes its fields.

    Building one takes milliseconds.
    """
    return TypeAdapter(chosen)


@cache
def fields_in_source(place: str) -> list[str]:
    """Return the fields of one of distap's classes by reading its source.

    Importing the class could take seconds, since many need torch.
    """
    module, _, class_name = place.partition(":")
    root = Path(__file__).parents[2]
    source = root.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    tree = ast.parse(source)
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (definition,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )

    # A class may override a field of its base by a ClassVar, which is no field.
    is_field = dict[str, bool]()
    for base in map(ast.unparse, definition.bases):
        home = homes.get(base, module)
        if str(home).startswith("distap."):
            is_field |= dict.fromkeys(fields_in_source(f"{home}:{base}"), True)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            is_field[ast.unparse(node.target)] = "ClassVar" not in ast.unparse(node.annotation)
    return [name for name in is_field if is_field[name]]
