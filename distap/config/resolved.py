"""Print a recipe with all defaults, as YAML that is again a recipe, with the origin of each value."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from distap.config.reading import changed_settings, load_recipe
from distap.registry import REGISTRY, class_of

ABSENT = object()
Written = tuple[Any, Any]  # what stands at one place on the command line and in the changed recipe, or ABSENT


def resolved_lines(source: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a recipe after overrides, with all defaults; comments say where each value comes from."""
    values = load_recipe(source, overrides).model_dump(mode="json")
    written = _loss_in_full(changed_settings({}, overrides)), _loss_in_full(changed_settings(source, overrides))
    yield f"# distap config {' '.join([str(source), *overrides])}".replace("\n", " ")
    yield from _lines(values, written, "")


def _lines(values: Mapping[str, Any], written: Written, indent: str) -> Iterator[str]:
    for key, value in values.items():
        given, in_recipe = _below(written[0], key, value), _below(written[1], key, value)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_flow(key)}:"
            yield from _lines(value, (given, in_recipe), f"{indent}  ")
        else:
            place = "command line" if given is not ABSENT else "recipe" if in_recipe is not ABSENT else "default"
            yield f"{indent}{_flow(key)}: {_flow(value)}  # {place}"


def _below(written: Any, key: str, value: Any) -> Any:
    """Return a section's value of a key; a section in short form, such as `pooling: cls`, is one value."""
    if isinstance(written, Mapping):
        return written.get(key, ABSENT)
    return written if written in (key, value) else ABSENT


def _flow(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True).strip()[1:-1]


def _loss_in_full(settings: dict[str, Any]) -> dict[str, Any]:
    """Write out a loss that is a sum or has a preset, with all its terms and values."""
    loss = settings.get("loss")
    if not isinstance(loss, dict):
        return settings
    if "name" not in loss and loss.keys() & REGISTRY["loss"].keys():
        return settings | {"loss": {"name": "sum", "terms": loss}}
    presets: Any = getattr(class_of("loss", loss.get("name", "ap_q")), "presets", {})
    return settings | {"loss": {**presets.get(loss.get("preset"), {}), **loss}}
