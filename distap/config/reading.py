"""Read a recipe from YAML, exactly, apply overrides, and explain wrong keys and values."""

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from distap.config.evaluation_sections import DescribingSection
from distap.config.recipe import ImagesSection, NetworkRecipe, Recipe
from distap.config.sections import sections_in
from distap.errors import DistapError, holds_secret, problems_of, suggestion, without_secrets
from distap.registry import (
    REGISTRY,
    SOURCES,
    WAY_TO_TRUST,
    Builds,
    Part,
    builds_recorded,
    by_path,
    fields_of,
)
from distap.storage.locations import from_folder
from distap.storage.texts import MOST_TEXT, read_text

RECIPES = Path(__file__).parents[1] / "recipes"  # those of distap, each a YAML file
# Types of errors about unknown keys: two of pydantic, and ours.
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument", "unknown_key")
# Right places of keys that users often write elsewhere.
PLACES = {
    "lr": "optimizer.learning_rate",
    "warmup": "schedule.warmup",
    "weight_decay": "weight_decay of optimizer.backbone, optimizer.pooling or optimizer.head",
}

OF_SETS = ("train", "validation")  # whose mappings of names an override replaces as a whole
LENGTHS = ("steps", "epochs")  # of which an override of one replaces the other
R = TypeVar("R", bound=NetworkRecipe)
Overrides = Sequence[str | Mapping[str, Any]]


def load_recipe(
    source: Path | Mapping[str, Any], overrides: Overrides = (), where: str = "recipe"
) -> Recipe:
    """Read a recipe and apply overrides in order.

    Args:
        source: a YAML file, the name of a recipe of distap, or a dict.
        overrides: each a text such as `optimizer.learning_rate=1e-4`; or a dict, with such keys or
            nested, in which a dict that has a `name` replaces the part that was chosen before.
        where: what messages call a dict.
    Raises:
        DistapError: it names each wrong key or value with its line in the file.
    """
    settings = changed_settings(source, overrides)
    _refuse_secrets(settings)
    if isinstance(source, Mapping):
        return _checked(Recipe, settings, where)
    changed = list[str]()
    for override in overrides:
        if isinstance(override, Mapping):
            changed += dict(by_path(override, "."))
        else:
            changed.append(override.split("=")[0])
    return _checked(Recipe, settings, source, changed)


def _refuse_secrets(settings: Mapping[str, Any]) -> None:
    """Raise a DistapError for a password in a value, since recipes are recorded and logged."""
    for key, value in by_path(settings, "."):
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts:
            if isinstance(text, str | Path) and holds_secret(str(text)):
                raise DistapError(
                    "recipe.secret",
                    f"{key}: {without_secrets(str(text))!r}: credentials in a URL, in front of its"
                    " host or in a query, end up in logs and checkpoints; put them into the"
                    " environment",
                )
    if re.match(r"\w{2,}:/", str(settings.get("run", ""))):
        raise DistapError(
            "recipe.run_not_local",
            f"run: {settings['run']}: must be a folder on this machine; checkpoint.store takes"
            " a URL",
        )


def changed_settings(source: Path | Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a recipe's settings after overrides, unchecked and without defaults."""
    settings = _copied(source) if isinstance(source, Mapping) else _read(recipe_file(source))
    return _overridden(settings, overrides)


def is_recipe(source: Path | str) -> bool:
    """Return whether a source is a recipe, by its file or by its name, and no run."""
    is_ours = not Path(source).exists() and (RECIPES / f"{source}.yaml").is_file()
    return is_ours or Path(source).suffix in (".yaml", ".yml")


def recipe_file(config: Path) -> Path:
    """Return the path of a recipe: `config` itself, or the file of distap's recipe of that name."""
    is_name = len(config.parts) == 1 and not config.suffix
    ours = RECIPES / f"{config}.yaml"
    if is_name and not config.is_file() and ours.is_file():
        return ours
    if config.is_dir():
        raise DistapError(
            "recipe.folder",
            f"{config}: a folder; a recipe is a YAML file, and `distap init {config}` writes one"
            " for images",
        )
    if config.exists():
        return config
    if not is_name:
        raise DistapError("recipe.not_found", f"{config}: the recipe cannot be read: no such file")
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    raise DistapError(
        "recipe.not_found",
        f"{config}: no such file, and no recipe of distap has this name;"
        f" {suggestion(str(config), names)} `distap recipes` lists them",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, MOST_TEXT // 64)
    except (OSError, ValueError) as error:
        raise DistapError(
            "recipe.unreadable", f"{path}: the recipe cannot be read: {error}"
        ) from error
    settings = parsed_yaml(text, str(path))
    if not isinstance(settings, dict):
        raise DistapError(
            "recipe.not_yaml", f"{path}: expected keys with values, such as `steps: 100`"
        )
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
        source: what a DistapError about a wrong value names.
        folder: resolves relative paths in the record; None keeps them as they are.
        overrides: changes, such as `data.image_size=320`.
        trusted: take classes that are not distap's; and architectures from hubs and folders, of a
            whole network too.
    """
    # Random weights, since trained tensors replace them, and the pretrained ones may not be there
    # any more.
    recorded: dict[str, Any] = {"model": {**settings["model"], "weights": "random"}}
    for name, section in (("data", ImagesSection), ("evaluation", DescribingSection)):
        recorded[name] = {
            key: value for key, value in settings.get(name, {}).items() if key in fields_of(section)
        }
    images = recorded["data"]
    if folder is not None and folder != str(Path.cwd()) and Path(folder).is_dir():
        for key in ("validation", "gallery"):
            place = images.get(key)
            if isinstance(place, Mapping):
                images[key] = {name: from_folder(path, folder) for name, path in place.items()}
            elif place:
                images[key] = from_folder(place, folder)
    settings_of_network = _overridden(recorded, overrides)
    recipe = _checked(NetworkRecipe, settings_of_network, source, builds=builds_recorded(trusted))
    architecture = recipe.model.architecture
    # The tensors of a base, as of peft's adapters, are read elsewhere in any case; those of a whole
    # network stand next to the record.
    if not trusted and settings.get("base") is None and architecture.startswith(SOURCES):
        raise DistapError(
            "network.untrusted",
            f"{source}: model.backbone: its record has the architecture read from {architecture};"
            f" if you trust who wrote it, say so by {WAY_TO_TRUST}",
        )
    return recipe


def _place(source: Path | str, changed: Sequence[str], key: str) -> str:
    """Name a recipe, and the line of `key` or its section in a file unless an override has set it.

    A text names a recipe that is no file.
    """
    is_changed = any(f"{key}.".startswith(f"{override}.") for override in changed)
    if is_changed or isinstance(source, str):
        return str(source)
    line = line_of(recipe_file(source).read_text("utf-8"), key.split("."))
    return f"{source}:{line}" if line else str(source)


def _checked(
    kind: type[R],
    settings: dict[str, Any],
    source: Path | str,
    changed: Sequence[str] = (),
    builds: Builds | None = None,
) -> R:
    """Validate settings and build their parts, or only those for which `builds` is true.

    A DistapError names `source`, with the lines of wrong keys but for those `changed` by overrides.
    """
    try:
        # First without the classes of parts, whose import takes seconds: a typo is found at once.
        kind.model_validate(settings, context=_builds_none)
        return kind.model_validate(settings, context=builds)
    except ValidationError as error:
        problems = problems_of(_as_written(dict(item), settings, kind) for item in error.errors())
        lines = [
            f"{_place(source, changed, problem.partition(':')[0])}: {without_secrets(problem)}"
            for problem in problems
        ]
        raise DistapError("recipe.value", "\n".join(lines)) from error


def _builds_none(part: Part) -> bool:
    return False


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
                "recipe.override",
                f"override {override!r}: expected key=value, such as optimizer.learning_rate=1e-4",
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
        is_section = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
        if is_section and "name" not in value and not is_sum and last not in OF_SETS:
            _merge(_section(section, [last], key), value)
        else:
            section[last] = _copied(value) if isinstance(value, Mapping) else value


def _section(settings: dict[str, Any], parents: Sequence[str], override: str) -> dict[str, Any]:
    """Return the section at the end of `parents`; create missing ones."""
    for above, parent in zip(["", *parents], parents, strict=False):
        if settings.get(parent) is None:
            settings[parent] = {}
        elif isinstance(settings[parent], str) and parent not in OF_SETS:
            # as of `loss: ap_q`, or of a data set
            settings[parent] = {"data" if above in OF_SETS else "name": settings[parent]}
        settings = settings[parent]
        if not isinstance(settings, dict):
            raise DistapError(
                "recipe.override", f"override {override!r}: {parent} is a value, it has no keys"
            )
    return settings


def _as_written(
    error: dict[str, Any], settings: dict[str, Any], kind: type[NetworkRecipe]
) -> dict[str, Any]:
    """Return an error of pydantic with the recipe's keys, and a hint if a key is unknown."""
    keys = _written_keys(list(error["loc"]), settings)
    written = {**error, "loc": keys}
    if error["type"] not in UNKNOWN_KEY:
        return written
    known = _sibling_keys(keys, kind)
    if keys[-1] in PLACES:
        hint = f"did you mean {PLACES[keys[-1]]}?"
    elif error["type"] != "unknown_key" or difflib.get_close_matches(keys[-1], known):
        hint = suggestion(keys[-1], known)
    else:
        return written
    return {**written, "type": "unknown_key", "msg": f"unknown key; {hint}"}


def _written_keys(location: list[int | str], settings: dict[str, Any]) -> list[str]:
    """Convert pydantic's location to the recipe's keys, without the tags of unions."""
    loss = settings.get("loss")
    is_of_term = location[:2] == ["loss", "terms"]
    if is_of_term and isinstance(loss, dict) and "terms" not in loss:
        # {sup_ap: 0.5, ...} was read as terms: pairs of a weight (0) and a loss (1).
        number, place, *keys_of_term = location[2:]
        name = str(list(loss)[int(number)])
        return ["loss", name, *(map(str, keys_of_term) if place else ["weight"])]
    keys: list[str] = []
    section: Any = settings
    for key in location:
        # A key that is missing comes last; so may tags, such as `chosen` and `list[str]`.
        is_missing = key == location[-1] != "chosen" and "[" not in str(key)
        if isinstance(section, dict) and (key in section or is_missing):
            keys.append(str(key))
            section = section.get(key)
        elif isinstance(section, list) and isinstance(key, int):
            keys.append(str(key))
            section = section[key] if key < len(section) else None
    return keys


def _sibling_keys(keys: list[str], kind: type[NetworkRecipe]) -> list[str]:
    """Return the known keys of the section of the last of `keys`; none in a part with a name."""
    section: Any = kind
    for key in keys[:-1]:
        field = getattr(section, "model_fields", {}).get(key)
        # A key that is no field is a name in a mapping of names to sections.
        if field is not None:
            section = next(sections_in(field.annotation), None)
    return fields_of(section) if section else []


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses aliases and keys that stand twice.

    A few lines of aliases can stand for billions of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"an alias, *{alias.anchor}", problem_mark=alias.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parsed_yaml(text: str, where: str, comments: bool = True) -> Any:
    """Parse YAML; a DistapError names `where` and the place in the text.

    Without `comments`, as on a command line, refuse a text that has one, such as `run=runs/exp #1`.
    """
    try:
        tokens = [] if comments else list(yaml.scan(text, _Loader))
        if any(
            "#" in text[token.end_mark.index : following.start_mark.index]
            for token, following in pairwise(tokens)
        ):
            raise DistapError(
                "recipe.comment_in_value",
                f"{where}: a comment within a value; put quotes around the text that holds #",
            )
        return yaml.load(text, _Loader)
    # A ValueError comes from a date such as 2026-02-31.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DistapError(
            "recipe.not_yaml", f"{where}: not valid YAML: {str(error) or type(error).__name__}"
        ) from error


def line_of(text: str, keys: Sequence[str]) -> int:
    """Return the line, from 1, of the innermost of these nested keys in a text; 0 if none is."""
    node = yaml.compose(text, _Loader)
    line = 0
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        at_key = [pair for pair in pairs if pair[0].value == key]
        if not at_key:
            break
        line = at_key[0][0].start_mark.line + 1
        node = at_key[0][1]
    return line
