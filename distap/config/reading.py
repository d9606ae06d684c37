"""Read a recipe from YAML, exactly, apply overrides, and explain wrong keys and values."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from distap.config.recipe import DescribingSection, ImagesSection, NetworkRecipe, Recipe
from distap.errors import DistapError, holds_secret, problems_of, suggestion, without_secrets
from distap.registry import (
    REGISTRY,
    SOURCES,
    WAY_TO_TRUST,
    Builds,
    builds_recorded,
    by_path,
    fields_of,
)
from distap.storage.locations import from_folder
from distap.storage.texts import MOST_TEXT, read_text

RECIPES = Path(__file__).parents[1] / "recipes"  # those of distap, each a YAML file
# two of pydantic, and ours
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument", "unknown_key")
# Right places of keys that users often write elsewhere.
PLACES = {
    "lr": "optimizer.learning_rate",
    "warmup": "schedule.warmup",
    "weight_decay": "weight_decay of optimizer.backbone, optimizer.pooling or optimizer.head",
}

LENGTHS = ("steps", "epochs")  # two ways to say one thing: an override of one replaces the other
R = TypeVar("R", bound=NetworkRecipe)
Overrides = Sequence[str | Mapping[str, Any]]
Place = Callable[[str], str]  # where a dotted key stands, such as recipe.yaml:3


def load_recipe(
    source: Path | Mapping[str, Any], overrides: Overrides = (), where: str = "recipe"
) -> Recipe:
    """Read a recipe from a YAML file, by name, or from a dict, which messages call `where`; apply
    overrides in order.

    An override is a text such as `optimizer.learning_rate=1e-4`; or a dict, with such keys or
    nested, in which a dict that has a `name` replaces the part that was chosen before. A
    DistapError names each wrong key or value with its line in the file.
    """
    settings = changed_settings(source, overrides)
    _refuse_secrets(settings)
    if isinstance(source, Mapping):
        return _checked(Recipe, settings, lambda key: where)
    keys = (
        dict(by_path(one, ".")) if isinstance(one, Mapping) else [one.split("=")[0]]
        for one in overrides
    )
    return _checked(Recipe, settings, partial(_place, source, [*chain.from_iterable(keys)]))


def _refuse_secrets(settings: Mapping[str, Any]) -> None:
    """Raise a DistapError for a value that names a place with a password: a recipe is recorded,
    logged and shown.
    """
    for key, value in by_path(settings, "."):
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts:
            if isinstance(text, str | Path) and holds_secret(str(text)):
                raise DistapError(
                    f"{key}: {without_secrets(str(text))!r}: credentials in a URL, in front of its"
                    " host or in a query, end up in logs and checkpoints; put them into the"
                    " environment"
                )
    if re.match(r"\w{2,}:/", str(settings.get("run", ""))):
        raise DistapError(
            f"run: {settings['run']}: must be a folder on this machine; checkpoint.store takes"
            " a URL"
        )


def changed_settings(source: Path | Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a recipe's settings after overrides, as `load_recipe` reads them, unchecked and
    without defaults.
    """
    settings = _copied(source) if isinstance(source, Mapping) else _read(recipe_file(source))
    return _overridden(settings, overrides)


def is_recipe(source: Path | str) -> bool:
    """Tell whether a source is a recipe, by its file or by its name, and no run."""
    is_ours = not Path(source).exists() and (RECIPES / f"{source}.yaml").is_file()
    return is_ours or Path(source).suffix in (".yaml", ".yml")


def recipe_file(config: Path) -> Path:
    """Return the path of a recipe: `config` itself, or the file of a recipe that distap ships, by
    its name.
    """
    is_name = len(config.parts) == 1 and not config.suffix
    ours = RECIPES / f"{config}.yaml"
    if is_name and not config.is_file() and ours.is_file():
        return ours
    if config.is_dir():
        raise DistapError(
            f"{config}: a folder; a recipe is a YAML file, and `distap init {config}` writes one"
            " for images"
        )
    if not config.exists() and not is_name:
        raise DistapError(f"{config}: the recipe cannot be read: no such file")
    if not config.exists():
        names = sorted(each.stem for each in RECIPES.glob("*.yaml"))
        raise DistapError(
            f"{config}: no such file, and no recipe of distap has this name;"
            f" {suggestion(str(config), names)} `distap recipes` lists them"
        )
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, MOST_TEXT // 64)
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: the recipe cannot be read: {error}") from error
    settings = parsed_yaml(text, str(path))
    if not isinstance(settings, dict):
        raise DistapError(f"{path}: expected keys with values, such as `steps: 100`")
    return settings


def recorded_recipe(
    settings: Mapping[str, Any],
    source: str,
    folder: str | None = None,
    overrides: Sequence[str] = (),
    trusted: bool = False,
) -> NetworkRecipe:
    """Read the part of a recorded recipe that a trained network needs.

    Args:
        source: what a DistapError about a wrong value names. folder: resolves relative paths in the
            record; None keeps them as they are. overrides: changes, such as `data.image_size=320`.
            trusted: take classes that are not distap's; and architectures from hubs and folders, of
            a whole network too.
    """
    # Random weights, since trained tensors replace them, and the pretrained ones may not be there
    # any more.
    kept: dict[str, Any] = {"model": {**settings["model"], "weights": "random"}}
    for name, section in (("data", ImagesSection), ("evaluation", DescribingSection)):
        kept[name] = {
            key: value for key, value in settings.get(name, {}).items() if key in fields_of(section)
        }
    for key in ("validation", "gallery"):
        if (
            kept["data"].get(key)
            and folder not in (None, str(Path.cwd()))
            and Path(str(folder)).is_dir()
        ):
            kept["data"][key] = from_folder(kept["data"][key], str(folder))
    recipe = _checked(
        NetworkRecipe, _overridden(kept, overrides), lambda key: source, builds_recorded(trusted)
    )
    architecture = recipe.model.architecture
    # Of a base, as of peft's adapters, tensors are read elsewhere in any case; of a whole network,
    # nothing need be.
    if not trusted and settings.get("base") is None and architecture.startswith(SOURCES):
        raise DistapError(
            f"{source}: model.backbone: its record has the architecture read from {architecture};"
            f" if you trust who wrote it, say so by {WAY_TO_TRUST}"
        )
    return recipe


def _place(source: Path, changed: Sequence[str], key: str) -> str:
    """Name a recipe's file, with the line of `key` or its section unless an override has set it."""
    if any(f"{key}.".startswith(f"{each}.") for each in changed):
        return str(source)
    line = line_of(recipe_file(source).read_text("utf-8"), key.split("."))
    return f"{source}:{line}" if line else str(source)


def _checked(
    kind: type[R], settings: dict[str, Any], where: Place, builds: Builds = lambda part: True
) -> R:
    try:
        # First without the classes of parts, which take seconds to import, so that a typo is told
        # at once.
        kind.model_validate(settings, context=lambda part: False)
        return kind.model_validate(settings, context=builds)
    except ValidationError as error:
        problems = problems_of(_as_written(dict(item), settings, kind) for item in error.errors())
        told = [f"{where(each.partition(':')[0])}: {without_secrets(each)}" for each in problems]
        raise DistapError("\n".join(told)) from error


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested dicts and keep their values."""
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }


def _overridden(settings: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Apply overrides to settings in order, and return the settings."""
    before = {key: settings.get(key) for key in LENGTHS}
    for override in overrides:
        if isinstance(override, Mapping):
            _merge(settings, override)
            continue
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise DistapError(
                f"override {override!r}: expected key=value, such as optimizer.learning_rate=1e-4"
            )
        *parents, last = key.split(".")
        value = parsed_yaml(text, f"override {override!r}", comments=False)
        _section(settings, parents, override)[last] = value
    changed = [key for key in LENGTHS if settings.get(key) not in (None, before[key])]
    if len(changed) == 1:
        settings.pop(LENGTHS[1 - LENGTHS.index(changed[0])], None)
    return settings


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        *parents, last = str(key).split(".")
        section = _section(settings, parents, key)
        # A sum of losses replaces the loss chosen before; merged into it, the old terms would stay.
        is_sum = (
            last == "loss" and isinstance(value, Mapping) and value.keys() & REGISTRY["loss"].keys()
        )
        is_section = isinstance(value, Mapping) and all(isinstance(each, str) for each in value)
        if is_section and "name" not in value and not is_sum:
            _merge(_section(section, [last], key), value)
        else:
            section[last] = _copied(value) if isinstance(value, Mapping) else value


def _section(settings: dict[str, Any], parents: Sequence[str], override: str) -> dict[str, Any]:
    """Return the section at the end of `parents`; create missing ones."""
    for parent in parents:
        if settings.get(parent) is None:
            settings[parent] = {}
        elif isinstance(settings[parent], str):  # a name alone, such as `loss: ap_q`
            settings[parent] = {"name": settings[parent]}
        settings = settings[parent]
        if not isinstance(settings, dict):
            raise DistapError(f"override {override!r}: {parent} is a value, it has no keys")
    return settings


def _as_written(
    error: dict[str, Any], settings: dict[str, Any], kind: type[NetworkRecipe]
) -> dict[str, Any]:
    """Return an error of pydantic with the keys of the recipe, and with a hint if a key is
    unknown."""
    keys = _written_keys(error["loc"], settings)
    if error["type"] not in UNKNOWN_KEY:
        return {**error, "loc": keys}
    known = _known_beside(keys, kind)
    hint = ""
    if keys[-1] in PLACES:
        hint = f"did you mean {PLACES[keys[-1]]}?"
    elif error["type"] != "unknown_key" or difflib.get_close_matches(keys[-1], known):
        hint = suggestion(keys[-1], known)
    told = {"type": "unknown_key", "msg": f"unknown key; {hint}"} if hint else {}
    return {**error, "loc": keys, **told}


def _written_keys(location: tuple[int | str, ...], settings: dict[str, Any]) -> list[str]:
    """Convert pydantic's location to the recipe's keys: without tags of unions, terms of a sum by
    name.
    """
    loc = list(location)
    loss = settings.get("loss")
    if loc[:2] == ["loss", "terms"] and isinstance(loss, dict) and "terms" not in loss:
        number, place, *rest = loc[2:]
        return ["loss", str(list(loss)[int(number)]), *(map(str, rest) if place else ["weight"])]
    keys: list[str] = []
    here: Any = settings
    for part in loc:
        if isinstance(here, dict) and (
            part in here or (part == loc[-1] != "chosen" and "[" not in str(part))
        ):
            keys.append(str(part))
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            keys.append(str(part))
            here = here[part] if part < len(here) else None
    return keys


def _known_beside(keys: list[str], kind: type[NetworkRecipe]) -> list[str]:
    """Return the known keys of the section that contains the last of `keys`; none of a part that
    has a name.
    """
    section: Any = kind
    for key in keys[:-1]:
        field = getattr(section, "model_fields", {}).get(key)
        inside = [] if field is None else [field.annotation, *get_args(field.annotation)]
        section = next((one for one in inside if isinstance(one, type) and fields_of(one)), None)
    return fields_of(section) if section else []


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, whose few lines can stand for billions of values, nor
    any key twice.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"an alias, *{alias.anchor}", problem_mark=alias.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in known:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                )
            known.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parsed_yaml(text: str, where: str, comments: bool = True) -> Any:
    """Parse YAML; a DistapError names `where` and the place in the text.

    Without `comments`, as on a command line, a text in which one begins is refused: `run=runs/exp
    #1`.
    """
    try:
        tokens = [] if comments else list(yaml.scan(text, _Loader))
        if any(
            "#" in text[one.end_mark.index : then.start_mark.index]
            for one, then in pairwise(tokens)
        ):
            raise DistapError(
                f"{where}: a comment within a value; put quotes around the text that holds #"
            )
        return yaml.load(text, _Loader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: such as of the date 2026-02-31
        raise DistapError(
            f"{where}: not valid YAML: {str(error) or type(error).__name__}"
        ) from error


def line_of(text: str, keys: Sequence[str]) -> int:
    """Return the line, from 1, of the innermost of these nested keys that the text has; 0 if it has
    none.
    """
    node = yaml.compose(text, _Loader)
    line = 0
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next((pair for pair in pairs if pair[0].value == key), None)
        if found is None:
            break
        line = found[0].start_mark.line + 1
        node = found[1]
    return line
